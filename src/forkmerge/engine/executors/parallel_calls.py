"""Independent calls, here or in spawned processes: what one of them does, even its death, leaves the others alone.

A call whose process died is made again: runs go on from their last checkpoint.
"""

from __future__ import annotations

import platform
import secrets
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from forkmerge.engine.executors.devices import set_own_index
from forkmerge.engine.executors.executor import Answer, Call, Tell, WorkerError
from forkmerge.engine.executors.executor_options import ExecutorOptions, LocalOptions
from forkmerge.engine.executors.pending_calls import CallLost, PendingCall, PendingCalls
from forkmerge.errors import ForkMergeError, ProblemError

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """A call that raised, or ended process after process.

    Args:
        error: What went wrong, in one line.
        details: The traceback, if there is one.
    """

    error: str
    details: str = ""


def run_calls(
    function: Callable[[Job, Tell], Result],
    jobs: Sequence[Job],
    executor: int | ExecutorOptions,
    news: Callable[[int, Any], None] = lambda index, value: None,
    names: Sequence[str] | None = None,
    folder: Path | None = None,
) -> Iterator[tuple[int, Result | Failure]]:
    """Yield `(position of the job, result or failure)` for every job, as they end.

    Args:
        function: `function(job, tell) -> result`; at module level where there are several workers.
        jobs: What it is called with, in this order.
        executor: Where; a number is one of processes, of which 1 calls here, one after the other.
        news: Called with a job's position and whatever its call tells, and with None whenever the call begins.
        names: What the calls are, for people.
        folder: Where calls write; workers of other machines that do not see it are refused before they begin.
    """
    options = LocalOptions(executor) if isinstance(executor, int) else executor
    names = names or [f"call {index + 1} of {len(jobs)}" for index in range(len(jobs))]
    needed = None if options.shares_files else folder
    with _shown(needed) as shown, options.open(len(jobs)) as engine:
        engine.start(_Caller(function, not engine.runs_here, shown))
        calls = PendingCalls(engine)
        positions = {
            calls.submit(job, name=names[index], note=partial(news, index)): index for index, job in enumerate(jobs)
        }
        for call in calls:
            yield positions[call], _result_of(call)


def _result_of(call: PendingCall) -> Any:
    try:
        return call.result()
    except CallLost as lost:
        return Failure(f"it ended {lost.attempts} processes, the last with {lost.reason}")
    except WorkerError as error:  # what the function raises is a result
        last = str(error).strip().splitlines()[-1]
        return Failure(f"its result could not be sent: {last}", str(error))


@contextmanager
def _shown(folder: Path | None) -> Iterator[Path | None]:
    """Keep a file of a name that nobody can guess in a folder, for workers to look for."""
    if folder is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".seen-by-workers-{secrets.token_hex(8)}"
    file.touch()
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Caller:
    """Makes what does a worker's calls."""

    function: Callable[[Any, Tell], Any]
    has_own_process: bool
    shown: Path | None = None

    def __call__(self, index: int) -> Call:
        """Return what calls the function with every job."""
        if self.has_own_process:  # this one, which may be somebody else's worker
            set_own_index(index)
        if self.shown is not None and not self.shown.is_file():
            raise ProblemError(
                f"a worker on {platform.node()} does not see {self.shown.parent}, where runs are kept: give a folder "
                "on storage that all nodes share."
            )
        return lambda job, inputs, tell: Answer(_call(self.function, job, tell))


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
