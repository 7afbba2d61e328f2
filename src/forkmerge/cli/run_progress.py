"""How far a run is, from the events of `fit`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from forkmerge.algorithms.table_data import show_number, show_shares, show_steps
from forkmerge.cli.progress import Clock, ProgressView
from forkmerge.experiments.units import show_bytes


class RunView(ProgressView):
    """Where a run stands: phase, round, branch, step, score.

    Its work are branch-steps, a refit's included, and merges. Pruning, and parts that were finished before a resume,
    may shorten it.

    Args:
        steps: T.
        rounds: Rounds of one phase.
        refit: Whether a refit follows the search.
        total: Branch-steps of all parts of an algorithm that is made of several runs.
        clock: Seconds, monotonic.

    Attributes:
        checkpoint: Where the newest checkpoint stands, e.g. "step 400"; None before the first.
    """

    between_lines: ClassVar[float] = 5.0

    def __init__(self, steps: int, rounds: int, *, refit: bool, total: int = 0, clock: Clock = time.monotonic) -> None:
        super().__init__(clock=clock)
        self.rounds, self.refit, self.total = rounds, refit, total
        self.phase, self.round, self.branch, self.step = "start", 1, "", 0
        self.score: float | None = None
        self.branches: list[str] = []
        self.checkpoint: str | None = None
        self._until, self._merged_at = steps, 0
        self._at: dict[str, int] = {}  # step of every branch
        self._searched = 0  # branch-steps of the search phase, which a refit repeats
        self._last = clock()
        for kind in ("training", "merging"):
            self.progress.add(kind, kind, 0)

    def take(self, event: Mapping[str, Any]) -> str | None:
        """Take in an event and return the line that it deserves, if any."""
        now, kind = self.progress.clock(), event["event"]
        elapsed, self._last = now - self._last, now
        if kind == "segment":
            # The first segment also waits for worker processes to start.
            self._segment(event, elapsed if self.progress.parts["training"].done else min(elapsed, event["seconds"]))
        elif kind == "round":
            self.score = event["score"] if event["score"] is not None else self.score
            self.progress.spend("merging", 1, elapsed)
        elif kind == "start":
            self.phase, self.branches = event["phase"], list(event["branches"])
        elif kind in ("checkpoint", "resume"):
            self._save(event)
            self.progress.spend("merging", 0, elapsed if kind == "checkpoint" else 0.0)
        training, merging = self.progress.parts["training"], self.progress.parts["merging"]
        training.work = training.done + self.remaining
        # Before the first merge nobody knows how long one takes.
        merges = max(self.rounds - self.round + 1, 0) if merging.done and self.phase != "done" else 0
        merging.work = merging.done + merges
        return self._describe(event)

    def _segment(self, event: Mapping[str, Any], seconds: float) -> None:
        self.phase, self.branch, self.step = event["phase"], event["branch"], event["step"]
        self.round = self._round_of(event)
        steps = self.step - self._at.get(self.branch, self._merged_at)
        self._at[self.branch] = self.step
        self.progress.spend("training", steps, seconds)
        if self.phase == "search" and self.branch != "floor":
            self._searched += steps

    def _save(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "resume":
            self._searched = event["step"] * len([name for name in event["branches"] if name != "floor"])
        self.phase, self.step, self._until = event["phase"], event["step"], event["until"]
        self.branches = list(event["branches"])
        if self.step < self._until:
            self.round = self._round_of(event)
        steps = event.get("steps") or dict.fromkeys(self.branches, self.step)
        self._merged_at, self._at = self.step, dict(steps)
        self.checkpoint = show_steps(self.phase, steps)

    def _round_of(self, event: Mapping[str, Any]) -> int:
        return int((event["round"] - 1) % self.rounds + 1)

    @property
    def remaining(self) -> int:
        """Branch-steps still to be trained."""
        others = self.total - int(self.progress.parts["training"].done)
        if self.phase == "done":
            return max(others, 0)
        ahead = sum(self._until - self._at.get(name, self._merged_at) for name in self.branches)
        if self.phase == "search" and self.refit:
            branches = [name for name in self.branches if name != "floor"]
            ahead += self._searched + sum(self._until - self._at.get(name, self._merged_at) for name in branches)
        return max(ahead, others)

    def stand(self) -> str:
        """Return phase, round, branch, step and last score in one line."""
        score = "" if self.score is None else f"  score {show_number(self.score)}"
        return f"{self.phase} {self.round}/{self.rounds}  {self.branch}  step {self.step}/{self._until}{score}"

    def _describe(self, event: Mapping[str, Any]) -> str | None:
        kind = event["event"]
        if kind == "round":
            shares = show_shares(event["coefficients"])
            merged = shares if len(event["branches"]) > 1 else ""
            score = "" if event["score"] is None else f"score {show_number(event['score'])}"
            position = f"{event['phase']} {self.round}/{self.rounds}  step {event['end']}"
            fault = "" if shares else "every branch was faulty: last good state kept"
            return "  ".join(part for part in (position, score, merged, fault) if part)
        if kind == "probe":
            return f"probe  {event['branch']}  step {event['step']}  score {show_number(event['score'])}"
        if kind == "resume":
            return f"continuing from the checkpoint at {self.checkpoint}"
        if kind == "start" and "branch_bytes" in event:
            return f"the branches of every round are kept: {show_bytes(event['branch_bytes'])} on disk in all"
        return None
