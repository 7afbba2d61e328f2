"""How far a comparison is: the time left at each method's own pace, and a line for every run that ends."""

from __future__ import annotations

import pytest

from forkmerge.algorithms.events import Event
from forkmerge.cli.comparison_progress import ComparisonView
from forkmerge.experiments.events import JobEnded, JobProgress, JobsPlanned, JobStarted


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def begin(kinds: list[str], work: list[int], ended: int = 0) -> Event:
    return JobsPlanned(jobs=len(kinds) + ended, ended=ended, kinds=kinds, work=[float(each) for each in work])


def end(index: int, error: str | None = None) -> Event:
    return JobEnded(index=index, title="EW  tgt  seed 0", result="test acc 0.5", error=error)


def test_the_time_left_follows_each_methods_own_pace():
    clock = Clock()
    view = ComparisonView(2, clock)
    kinds = ["slow", "fast", "fast", "new", "new"]
    assert view(begin(kinds, [10, 10, 10, 10, 20], ended=1)) == "6 runs, 1 of them done already"
    assert view.progress.seconds_left is None
    view(JobStarted(index=0))
    view(JobStarted(index=1))
    clock.now = 10.0
    # Nobody has seen the others yet: 50 steps at 1 s, of which the slow run has had 10 s, in two processes.
    assert view(end(1)) == "EW  tgt  seed 0  test acc 0.5  (2/6 runs  20 s left)"
    view(JobStarted(index=2))
    clock.now = 30.0
    view(JobProgress(index=0, steps=5))
    # slow: 6 s a step, 30 s to go; fast: 1 s a step and overdue; the rest at the mean pace of (10 + 30) / (10 + 5).
    assert view.progress.seconds_left == pytest.approx((30 + 0 + (10 + 20) * 40 / 15) / 2)
    line = view(end(2, error="broke"))
    assert line is not None
    assert line.startswith("EW  tgt  seed 0  failed: broke  (3/6 runs, 1 failed  ")
    assert view.progress.seconds_left == pytest.approx((30 + (10 + 20) * 40 / 15) / 2)


def test_the_pace_of_tuning_is_that_of_the_runs_that_follow():
    clock = Clock()
    view = ComparisonView(1, clock)
    view(begin(["ew"], [10]))
    view(JobStarted(index=0))
    clock.now = 20.0
    assert view(end(0)) == "EW  tgt  seed 0  test acc 0.5  (1/1 runs)"
    view(begin(["ew", "ew"], [10, 10]))
    assert view.progress.seconds_left == 40.0
    assert view.stand() == "0/2 runs"


def test_a_run_that_takes_more_steps_than_was_said_does_not_confuse_the_others():
    clock = Clock()
    view = ComparisonView(1, clock)
    view(begin(["ew", "ew"], [10, 10]))
    view(JobStarted(index=0))
    clock.now = 10.0
    view(JobProgress(index=0, steps=12))
    view(end(0))
    assert view.progress.seconds_left == 10.0
