"""How far some work is, and how long the rest will take; a `ProgressView` turns events into that, and into lines."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar

from forkmerge.algorithms.events.run_events import Event, Notice, PretrainingProgress
from forkmerge.algorithms.table_data import show_seconds

Clock = Callable[[], float]
"""Seconds, monotonic."""

_PRETRAINING_SECONDS = 10.0  # between two lines about it


@dataclass
class WorkPart:
    """A part of some work.

    Args:
        kind: Parts of one kind go at one pace.
        work: All of it, in a unit that all parts of its kind share.
        done: What is done of it.
        seconds: What that took.
        since: When the part under way was last heard of.
    """

    kind: str
    work: float
    done: float = 0.0
    seconds: float = 0.0
    since: float | None = None


class Progress:
    """Work in parts: what is done, and how long the rest will take.

    What is left of a part takes the pace of its kind so far, or the mean pace of all where its kind has not been seen
    yet, less the time since the part was last heard of; several processes share it.

    Args:
        workers: Processes.
        clock: Seconds, monotonic.
    """

    def __init__(self, workers: int = 1, clock: Clock = time.monotonic) -> None:
        self.workers, self.clock = workers, clock
        self.parts: dict[Hashable, WorkPart] = {}

    def add(self, key: Hashable, kind: str, work: float) -> None:
        """Add a part."""
        self.parts[key] = WorkPart(kind, work)

    def start(self, key: Hashable) -> None:
        """Let the clock of a part run."""
        self.parts[key].since = self.clock()

    def advance(self, key: Hashable, done: float) -> None:
        """Take in how much of a part that was started is done by now; what it was said to be may be too little."""
        part, now = self.parts[key], self.clock()
        self.spend(key, min(done, part.work) - part.done, now - (now if part.since is None else part.since))
        part.since = now

    def end(self, key: Hashable) -> None:
        """Take in that all of a part is done."""
        self.advance(key, self.parts[key].work)

    def drop(self, key: Hashable) -> None:
        """Forget a part that failed, and its pace."""
        del self.parts[key]

    def spend(self, key: Hashable, work: float, seconds: float) -> None:
        """Take in that some more work of a part was done, and the time it took."""
        part = self.parts[key]
        part.done, part.seconds = part.done + work, part.seconds + seconds

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time left; None before anything was measured."""
        paces: dict[str, list[float]] = {}
        for part in self.parts.values():
            if part.done:
                pace = paces.setdefault(part.kind, [0.0, 0.0])
                pace[0], pace[1] = pace[0] + part.seconds, pace[1] + part.done
        if not paces:
            return None
        mean = [sum(column) for column in zip(*paces.values(), strict=True)]
        rest = [part for part in self.parts.values() if part.done < part.work]
        total, now = 0.0, self.clock()
        for part in rest:
            seconds, done = paces.get(part.kind, mean)
            waited = 0.0 if part.since is None else now - part.since
            total += max((part.work - part.done) * seconds / done - waited, 0.0)
        return total / max(min(self.workers, len(rest)), 1)

    @property
    def share(self) -> float | None:
        """The share of the time that is over; None before anything was measured."""
        left = self.seconds_left
        spent = sum(part.seconds for part in self.parts.values()) / self.workers
        return None if left is None else spent / (spent + left) if spent + left else 1.0

    @property
    def time_left(self) -> str:
        """The time left in words; nothing before anything was measured, and at the end."""
        left = self.seconds_left
        is_over = all(part.done >= part.work for part in self.parts.values())
        return "" if left is None or is_over else f"{show_seconds(math.ceil(left))} left"


class ProgressView(ABC):
    """What is shown of some work.

    Args:
        workers: Processes.
        clock: Seconds, monotonic.
    """

    between_lines: ClassVar[float] = math.inf
    """Where there is no terminal, how long to wait for an event that deserves a line before saying how far it is."""

    def __init__(self, workers: int = 1, clock: Clock = time.monotonic) -> None:
        self.progress = Progress(workers, clock)
        self._pretraining = ""

    def __call__(self, event: Event) -> str | None:
        """Take in an event and return the line that it deserves, if any."""
        if isinstance(event, PretrainingProgress):
            return self._pretrain(event)
        if isinstance(event, Notice):
            return f"{'warning: ' if event.is_warning else ''}{event.text}"
        return self.take(event)

    @abstractmethod
    def take(self, event: Event) -> str | None:
        """Take in an event of the work itself and return the line that it deserves, if any."""

    @abstractmethod
    def stand(self) -> str:
        """Return where the work stands, in one line."""

    @property
    def line(self) -> str:
        """Where the work, or the pre-training before it, stands."""
        return self._pretraining or self.stand()

    @property
    def seconds_between_lines(self) -> float:
        """Seconds without a line after which to say how far it is."""
        return _PRETRAINING_SECONDS if self._pretraining else self.between_lines

    def _pretrain(self, event: PretrainingProgress) -> str | None:
        """Follow a pre-training, which comes before the work itself."""
        name, step, steps = event.name, event.step, event.steps
        self._pretraining = f"pre-training on {name}: step {step}/{steps}"
        if event.begins:
            self.progress.add("pretraining", "pretraining", steps - step)
            self.progress.start("pretraining")
            return f"pre-training on {name}, once: {steps} steps"
        if step < steps:
            part = self.progress.parts["pretraining"]
            self.progress.advance("pretraining", part.work - (steps - step))
            return None
        text, self._pretraining = self._pretraining, ""
        self.progress.drop("pretraining")  # its pace says nothing of what follows
        return text
