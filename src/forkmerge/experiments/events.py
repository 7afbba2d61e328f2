"""The events of comparisons and diagnoses, whose jobs are runs and pieces; whoever does them prints nothing."""

from __future__ import annotations

from dataclasses import dataclass

from forkmerge.algorithms.events.run_events import Event


@dataclass(frozen=True, kw_only=True)
class JobsPlanned(Event):
    """What is to be done.

    Args:
        jobs: All of them.
        ended: How many had ended before.
        kinds: What each of those is that are still to be done; jobs of one kind go at one pace.
        work: How much each of them is, an estimate.
    """

    jobs: int
    ended: int
    kinds: list[str]
    work: list[float]


@dataclass(frozen=True, kw_only=True)
class JobStarted(Event):
    """A job has been started.

    Args:
        index: Which of those that were still to be done.
    """

    index: int


@dataclass(frozen=True, kw_only=True)
class JobProgress(Event):
    """A job has done some of its work.

    Args:
        index: Which.
        steps: How much so far.
    """

    index: int
    steps: float


@dataclass(frozen=True, kw_only=True)
class JobEnded(Event):
    """A job has ended.

    Args:
        index: Which.
        title: What it was, in words.
        result: What it reached, in words.
        error: What went wrong; None if nothing did.
    """

    index: int
    title: str
    result: str
    error: str | None = None
