"""Independent calls, here or in spawned processes: what one of them does, even its death, leaves the others alone.

A call whose process died is made again: runs go on from their last checkpoint.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from forkmerge.engine.executors.worker_team import ATTEMPTS, Handler, Team, Tell
from forkmerge.errors import ForkMergeError

TrainingJob = TypeVar("TrainingJob")
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
    function: Callable[[TrainingJob, Tell], Result],
    jobs: Sequence[TrainingJob],
    workers: int,
    news: Callable[[int, Any], None] = lambda index, value: None,
) -> Iterator[tuple[int, Result | Failure]]:
    """Yield `(position of the job, result or failure)` for every job, as they end.

    Args:
        function: `function(job, tell) -> result`; at module level where there are several workers.
        jobs: What it is called with, in this order.
        workers: Processes; 1 calls here, one after the other.
        news: Called with a job's position and whatever its call tells, and with None whenever the call begins.
    """
    if workers == 1 or len(jobs) == 1:
        for index, job in enumerate(jobs):
            news(index, None)
            yield index, _call(function, job, lambda value, index=index: news(index, value))  # type: ignore[misc]
        return
    attempts = dict.fromkeys(range(len(jobs)), 0)
    team = Team(_Caller(function), min(workers, len(jobs)))
    try:
        waiting = list(range(len(jobs)))
        while waiting or any(worker.job is not None for worker in team.workers):
            for worker in team.free()[: len(waiting)]:
                index = waiting.pop(0)
                attempts[index] += 1
                worker.begin(index, jobs[index])
                news(index, None)
            for event in team.events():
                if event.kind == "news":
                    news(event.job, event.value)
                elif event.kind == "done":
                    yield event.job, event.value
                elif event.kind == "died" and attempts[event.job] < ATTEMPTS:
                    waiting.insert(0, event.job)
                elif event.kind == "died":
                    yield event.job, Failure(f"it ended {ATTEMPTS} processes, the last with {event.value}")
                else:
                    last = event.value.strip().splitlines()[-1]
                    yield event.job, Failure(f"its result could not be sent: {last}", event.value)
    finally:
        team.close()


@dataclass(frozen=True)
class _Caller:
    """Makes the handler of a worker process."""

    function: Callable[[Any, Tell], Any]

    def __call__(self, index: int) -> Handler:
        """Return what calls the function with every job."""
        return lambda job, memories, tell: (_call(self.function, job, tell), [])


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
