"""How far a run is, from the events of `fit`."""

from __future__ import annotations

import time
from typing import ClassVar

from forkmerge.algorithms.events.progress import Clock, ProgressView
from forkmerge.algorithms.events.run_events import (
    CheckpointWritten,
    Event,
    InPhase,
    PhaseStarted,
    ProbeScored,
    RoundFinished,
    RunFinished,
    RunResumed,
    RunStarted,
    StepProgress,
)
from forkmerge.algorithms.table_data import show_bytes, show_number, show_shares, show_steps


class RunView(ProgressView):
    """Where a run stands: phase, round, branch, step, score.

    Its work are branch-steps, a refit's included, and merges. Pruning, and parts that were finished before a resume,
    may shorten it.

    Args:
        clock: Seconds, monotonic.

    Attributes:
        checkpoint: Where the newest checkpoint stands, e.g. "step 400"; None before the first.
    """

    between_lines: ClassVar[float] = 5.0

    def __init__(self, clock: Clock = time.monotonic) -> None:
        super().__init__(clock=clock)
        self.rounds, self.refit, self.total = 1, False, 0
        self.phase, self.round, self.branch, self.step, self.part = "start", 1, "", 0, ""
        self.reached = ""
        self.branches: list[str] = []
        self.checkpoint: str | None = None
        self._until, self._merged_at = 0, 0
        self._at: dict[tuple[str, str], int] = {}  # step of every branch of every part
        self._searched = 0  # branch-steps of the search phase, which a refit repeats
        self._last = clock()
        for kind in ("training", "merging"):
            self.progress.add(kind, kind, 0)

    def take(self, event: Event) -> str | None:
        """Take in an event and return the line that it deserves, if any."""
        now, self.part = self.progress.clock(), event.part
        elapsed, self._last = now - self._last, now
        if isinstance(event, StepProgress):
            # The first segment also waits for worker processes to start.
            self._segment(event, elapsed if self.progress.parts["training"].done else min(elapsed, event.seconds))
        elif isinstance(event, RoundFinished):
            self.reached = event.record.reached or self.reached
            self.progress.spend("merging", 1, elapsed)
        elif isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, PhaseStarted):
            self.phase, self.branches, self._until = event.phase, list(event.branches), event.until
        elif isinstance(event, CheckpointWritten | RunResumed):
            self._save(event)
            self.progress.spend("merging", 0, elapsed if isinstance(event, CheckpointWritten) else 0.0)
        elif isinstance(event, RunFinished):
            self.phase = self.phase if event.part else "done"
        elif not isinstance(event, ProbeScored):
            self._last = now - elapsed  # a merge took it, whose round ends later
        self._look_ahead()
        return self._describe(event)

    def _start(self, event: RunStarted) -> None:
        self.phase, self.rounds, self.refit, self._until = "start", event.rounds, event.refit, event.steps
        self.round, self.step, self.branches, self._searched, self._merged_at = 1, 0, [], 0, 0
        if not event.part:
            self.total = event.branch_steps

    def _look_ahead(self) -> None:
        training, merging = self.progress.parts["training"], self.progress.parts["merging"]
        training.work = training.done + self.remaining
        # Before the first merge nobody knows how long one takes.
        merges = max(self.rounds - self.round + 1, 0) if merging.done and self.phase != "done" else 0
        merging.work = merging.done + merges

    def _segment(self, event: StepProgress, seconds: float) -> None:
        self.phase, self.branch, self.step = event.phase, event.branch, event.step
        self.round = self._round_of(event)
        steps = self.step - self._step_of(self.branch)
        self._at[self.part, self.branch] = self.step
        self.progress.spend("training", steps, seconds)
        if self.phase == "search" and self.branch != "floor":
            self._searched += steps

    def _save(self, event: CheckpointWritten | RunResumed) -> None:
        if isinstance(event, RunResumed):
            self._searched = event.step * len([name for name in event.steps if name != "floor"])
        self.phase, self.step, self._until = event.phase, event.step, event.until
        self.branches = list(event.steps)
        if self.step < self._until:
            self.round = self._round_of(event)
        others = {key: step for key, step in self._at.items() if key[0] != self.part}
        self._at = {**others, **{(self.part, name): step for name, step in event.steps.items()}}
        self._merged_at = self.step
        self.checkpoint = show_steps(self.phase, event.steps)

    def _round_of(self, event: InPhase) -> int:
        return (event.round - 1) % self.rounds + 1

    def _step_of(self, branch: str) -> int:
        return self._at.get((self.part, branch), self._merged_at)

    @property
    def remaining(self) -> int:
        """Branch-steps still to be trained."""
        others = self.total - int(self.progress.parts["training"].done)
        if self.phase == "done":
            return max(others, 0)
        ahead = sum(self._until - self._step_of(name) for name in self.branches)
        if self.phase == "search" and self.refit:
            branches = [name for name in self.branches if name != "floor"]
            ahead += self._searched + sum(self._until - self._step_of(name) for name in branches)
        return max(ahead, others)

    def stand(self) -> str:
        """Return phase, round, branch, step and last score in one line."""
        if self.phase == "start":
            return "starting"
        position = f"{self.phase} {self.round}/{self.rounds}  {self.branch}  step {self.step}/{self._until}"
        return "  ".join(part for part in (self.part, position, self.reached) if part)

    def _describe(self, event: Event) -> str | None:
        if isinstance(event, RoundFinished):
            record, shares = event.record, show_shares(event.record.coefficients)
            merged = shares if len(record.branches) > 1 else ""
            position = f"{event.phase} {self.round}/{self.rounds}  step {event.step}"
            fault = "" if shares else "every branch was faulty: last good state kept"
            return "  ".join(part for part in (self.part, position, record.reached, merged, fault) if part)
        if isinstance(event, ProbeScored):
            return f"probe  {event.branch}  step {event.step}  score {show_number(event.score)}"
        if isinstance(event, RunResumed):
            return f"continuing from the checkpoint at {self.checkpoint}"
        if isinstance(event, PhaseStarted) and event.branch_bytes:
            return f"the branches of every round are kept: {show_bytes(event.branch_bytes)} on disk in all"
        return None
