"""What a terminal shows while a run is under way.

The engine never prints. `Tracker` turns its events into numbers; `watching` draws them, as a bar on a terminal and as
plain lines elsewhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from forkmerge.cli.terminal import say
from forkmerge.experiments.units import show_bytes, show_seconds

_SECONDS_BETWEEN_LINES = 5.0


class Tracker:
    """How far a run is, and how long it will still take, from the events of `fit`.

    The time left is what the branch-steps so far took each, times the branch-steps that remain, a refit's included,
    plus the merges at what they took so far. Pruning, and parts that were finished before a resume, may shorten it.

    Args:
        steps: T.
        rounds: Rounds of one phase.
        refit: Whether a refit follows the search.
        total: Branch-steps of all parts of an algorithm that is made of several runs.
        clock: Seconds, monotonic.

    Attributes:
        checkpoint: Where the newest checkpoint stands, e.g. "step 400"; None before the first.
    """

    def __init__(
        self, steps: int, rounds: int, *, refit: bool, total: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.steps, self.rounds, self.refit, self.total, self.clock = steps, rounds, refit, total, clock
        self.phase, self.round, self.branch, self.step = "start", 1, "", 0
        self.score: float | None = None
        self.branches: list[str] = []
        self.checkpoint: str | None = None
        self._until, self._merged_at = steps, 0
        self._at: dict[str, int] = {}  # step of every branch
        self._searched = 0  # branch-steps of the search phase, which a refit repeats
        self._done = self._merges = 0
        self._training = self._merging = 0.0
        self._last = clock()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take in an event."""
        now = self.clock()
        elapsed, self._last = now - self._last, now
        kind = event["event"]
        if kind == "segment":
            # The first segment also waits for worker processes to start.
            self._training += elapsed if self._done else min(elapsed, event["seconds"])
            self._segment(event)
        elif kind == "round":
            self.score = event["score"] if event["score"] is not None else self.score
            self._merging += elapsed
            self._merges += 1
        elif kind == "start":
            self.phase, self.branches = event["phase"], list(event["branches"])
        elif kind in ("checkpoint", "resume"):
            self._stand(event)
            self._merging += elapsed if kind == "checkpoint" else 0.0

    def _segment(self, event: Mapping[str, Any]) -> None:
        self.phase, self.branch, self.step = event["phase"], event["branch"], event["step"]
        self.round = self._round_of(event)
        steps = self.step - self._at.get(self.branch, self._merged_at)
        self._at[self.branch] = self.step
        self._done += steps
        if self.phase == "search" and self.branch != "floor":
            self._searched += steps

    def _stand(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "resume":
            self._searched = event["step"] * len([name for name in event["branches"] if name != "floor"])
        self.phase, self.step, self._until = event["phase"], event["step"], event["until"]
        self.branches = list(event["branches"])
        if self.step < self._until:
            self.round = self._round_of(event)
        self._merged_at, self._at = self.step, {}
        self.checkpoint = f"{'refit ' if self.phase == 'refit' else ''}step {self.step}"

    def _round_of(self, event: Mapping[str, Any]) -> int:
        return int((event["round"] - 1) % self.rounds + 1)

    @property
    def done(self) -> int:
        """Branch-steps trained since this process started."""
        return self._done

    @property
    def remaining(self) -> int:
        """Branch-steps still to be trained."""
        if self.phase == "done":
            return max(self.total - self._done, 0)
        ahead = sum(self._until - self._at.get(name, self._merged_at) for name in self.branches)
        if self.phase == "search" and self.refit:
            branches = [name for name in self.branches if name != "floor"]
            ahead += self._searched + sum(self._until - self._at.get(name, self._merged_at) for name in branches)
        return max(ahead, self.total - self._done)

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time left; None before anything was measured."""
        if not self._done:
            return None
        merges = max(self.rounds - self.round + 1, 0)
        per_merge = self._merging / self._merges if self._merges else 0.0
        return self.remaining * self._training / self._done + merges * per_merge

    @property
    def line(self) -> str:
        """Phase, round, branch, step and last score in one line."""
        score = "" if self.score is None else f"  score {self.score:.4g}"
        return f"{self.phase} {self.round}/{self.rounds}  {self.branch}  step {self.step}/{self._until}{score}"


@contextmanager
def watching(console: Console, tracker: Tracker) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield the `observe` callback that shows a run's progress on a console."""
    if not console.is_terminal:
        yield _Lines(console, tracker)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, tracker)


class _Lines:
    """Plain lines: one per round, and otherwise at most one every few seconds."""

    def __init__(self, console: Console, tracker: Tracker) -> None:
        self.console, self.tracker = console, tracker
        self._shown = tracker.clock()

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.tracker(event)
        text = describe_event(event, self.tracker)
        now = self.tracker.clock()
        if text is None and event["event"] == "segment" and now - self._shown >= _SECONDS_BETWEEN_LINES:
            text = f"{self.tracker.line}  {_left(self.tracker)}".rstrip()
        if text is not None:
            self._shown = now
            say(self.console, text)


class _Bar:
    """A bar over all branch-steps, with the lines of the rounds above it."""

    def __init__(self, progress: Progress, tracker: Tracker) -> None:
        self.progress, self.tracker = progress, tracker
        self.task = progress.add_task("starting", total=None, left="")

    def __call__(self, event: Mapping[str, Any]) -> None:
        tracker = self.tracker
        tracker(event)
        text = describe_event(event, tracker)
        if text is not None:
            say(self.progress.console, text)
        self.progress.update(
            self.task,
            description=escape(tracker.line),
            completed=tracker.done,
            total=tracker.done + tracker.remaining,
            left=_left(tracker),
        )


def describe_event(event: Mapping[str, Any], tracker: Tracker) -> str | None:
    """Return the line that an event deserves, if any."""
    kind = event["event"]
    if kind == "round":
        shares = ", ".join(f"{name} {value:.2f}" for name, value in event["coefficients"].items())
        merged = shares if len(event["branches"]) > 1 else ""
        score = "" if event["score"] is None else f"score {event['score']:.4g}"
        place = f"{event['phase']} {tracker.round}/{tracker.rounds}  step {event['end']}"
        fault = "" if shares else "every branch was faulty: last good state kept"
        return "  ".join(part for part in (place, score, merged, fault) if part)
    if kind == "probe":
        return f"probe  {event['branch']}  step {event['step']}  score {event['score']:.4g}"
    if kind == "resume":
        return f"continuing from the checkpoint at {tracker.checkpoint}"
    if kind == "start" and "branch_bytes" in event:
        return f"the branches of every round are kept: {show_bytes(event['branch_bytes'])} on disk in all"
    return f"warning: {event['text']}" if kind == "warning" else None


def _left(tracker: Tracker) -> str:
    seconds = tracker.seconds_left
    return "" if seconds is None or tracker.phase == "done" else f"{show_seconds(math.ceil(seconds))} left"
