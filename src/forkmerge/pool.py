"""Independent calls, here or in spawned processes: what one of them does, even its death, leaves the others alone."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from forkmerge.errors import ForkMergeError
from forkmerge.execution import _end_with_parent

Job = TypeVar("Job")
Result = TypeVar("Result")
Tell = Callable[[Any], None]
"""What a call may use to say how far it is."""


@dataclass(frozen=True)
class Failure:
    """A call that raised, or whose process died.

    Args:
        error: What went wrong, in one line.
        details: The traceback, if there is one.
    """

    error: str
    details: str = ""


def run_calls(
    function: Callable[[Job, Tell], Result],
    jobs: Sequence[Job],
    workers: int,
    news: Callable[[int, Any], None] = lambda index, value: None,
) -> Iterator[tuple[int, Result | Failure]]:
    """Yield `(position of the job, result or failure)` for every job, as they end.

    Args:
        function: `function(job, tell) -> result`; at module level where there are several workers.
        jobs: What it is called with, in this order.
        workers: Processes; 1 calls here, one after the other.
        news: Called with a job's position and whatever its call tells, and with None when the call begins.
    """
    if workers == 1 or len(jobs) == 1:
        for index, job in enumerate(jobs):
            news(index, None)
            yield index, _call(function, job, lambda value, index=index: news(index, value))  # type: ignore[misc]
        return
    team = [_Worker(function) for _ in range(min(workers, len(jobs)))]
    try:
        waiting = list(enumerate(jobs))
        while waiting or any(worker.index is not None for worker in team):
            for worker in team:
                if worker.index is None and waiting:
                    index, job = waiting.pop(0)
                    worker.begin(index, job)
                    news(index, None)
            for worker in _with_message(team):
                index, kind, value = worker.receive()
                if kind == "news":
                    news(index, value)
                    continue
                if not worker.process.is_alive() or kind == "died":
                    team[team.index(worker)] = _Worker(function)
                yield index, value
    finally:
        for worker in team:
            worker.end()


class _Worker:
    """A process that waits for jobs, and the one it has in hand."""

    def __init__(self, function: Callable[[Any, Tell], Any]) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        # Not a daemon: those may not have children, and a training run may read its data in processes of its own.
        self.process: BaseProcess = context.Process(target=_serve, args=(function, other))
        self.process.start()
        other.close()
        self.index: int | None = None

    def begin(self, index: int, job: Any) -> None:
        """Hand over a job."""
        self.index = index
        with suppress(OSError):  # it died before: the end of the pipe will say so
            self.connection.send(job)

    def receive(self) -> tuple[int, str, Any]:
        """Return the position of the job in hand, and "news", "done" or "died" with what belongs to it."""
        index = self.index
        assert index is not None
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            kind, value = "died", Failure(f"its process died with exit code {code} (out of memory?)")
        if kind != "news":
            self.index = None
        return index, kind, value

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.terminate()
        self.process.join()
        self.connection.close()


def _with_message(team: Sequence[_Worker]) -> list[_Worker]:
    busy = {worker.connection: worker for worker in team if worker.index is not None}
    return [busy[connection] for connection in wait(list(busy))]  # type: ignore[index]  # pipes come back as they went


def _serve(function: Callable[[Any, Tell], Any], connection: Connection[Any, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout = sys.stderr  # standard output is the parent's, for results
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(("done", _call(function, job, lambda value: connection.send(("news", value)))))


def _call(function: Callable[[Any, Tell], Any], job: Any, tell: Tell) -> Any:
    try:
        return function(job, tell)
    except Exception as error:
        return Failure(describe_error(error), traceback.format_exc())


def describe_error(error: BaseException) -> str:
    """Return an error in one line; those raised on purpose speak for themselves."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ForkMergeError) else f"{type(error).__name__}: {text}".rstrip(": ")


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let torch use that many threads inside: sums depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
