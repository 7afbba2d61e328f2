"""How far a comparison is and how long it will still take, shown as a bar or as plain lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from forkmerge.algorithms.table_data import show_metrics
from forkmerge.cli.terminal import say
from forkmerge.experiments.run_results import RunResult
from forkmerge.experiments.units import show_seconds


class Pace:
    """The progress of a comparison, from the events of `run_comparison`.

    The time left is what the training steps that remain will take, each at the pace of its own method so far, or at
    the mean pace where a method has not been seen yet, divided by the number of processes.

    Args:
        workers: Processes.
        clock: Seconds, monotonic.
    """

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.workers, self.clock = workers, clock
        self.runs = self.ended = self.failed = 0
        self._work: list[int] = []
        self._methods: dict[int, str] = {}
        self._started: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._over: set[int] = set()
        self._pace: dict[str, tuple[float, int]] = {}

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take in an event."""
        kind, index = event["event"], event.get("index", -1)
        if kind == "begin":
            self.runs, self.ended, self._work = event["runs"], event["ended"], list(event["work"])
            self._methods, self._started, self._steps, self._over = {}, {}, {}, set()
        elif kind == "start":
            self._started[index], self._methods[index] = self.clock(), event["record"].method
        elif kind == "progress":
            self._steps[index] = event["steps"]
        elif kind == "end":
            self._end(index, event["record"])

    def _end(self, index: int, record: RunResult) -> None:
        self.ended += 1
        self.failed += record.error is not None
        self._over.add(index)
        if record.error is None and self._work[index]:
            seconds, steps = self._pace.get(record.method, (0.0, 0))
            self._pace[record.method] = seconds + self.clock() - self._started[index], steps + self._work[index]

    @property
    def running(self) -> list[int]:
        """Positions of the runs under way."""
        return [index for index in self._started if index not in self._over]

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time left; None before anything was measured."""
        paces = dict(self._pace)
        for index in self.running:  # a run under way is better than nothing
            if self._steps.get(index) and self._methods[index] not in paces:
                paces[self._methods[index]] = self.clock() - self._started[index], self._steps[index]
        seconds, steps = (sum(values) for values in zip(*paces.values(), strict=True)) if paces else (0.0, 0)
        if not steps:
            return None
        total = 0.0
        for index, work in enumerate(self._work):
            if index in self._over:
                continue
            spent, done = paces.get(self._methods.get(index, ""), (seconds, steps))
            total += max(work * spent / done - (self.clock() - self._started.get(index, self.clock())), 0.0)
        return total / min(self.workers, max(len(self._work) - len(self._over), 1))

    @property
    def line(self) -> str:
        """Where the comparison stands, in one line."""
        failed = f", {self.failed} failed" if self.failed else ""
        left = self.seconds_left
        time_left = "" if left is None or self.ended == self.runs else f"  {show_seconds(math.ceil(left))} left"
        return f"{self.ended}/{self.runs} runs{failed}{time_left}"


@contextmanager
def watching_runs(console: Console, workers: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield the callback that shows the progress of a comparison on a console."""
    pace = Pace(workers)
    if not console.is_terminal:

        def lines(event: Mapping[str, Any]) -> None:
            pace(event)
            text = describe(event, pace)
            if text is not None:
                say(console, text)

        yield lines
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def bar(event: Mapping[str, Any]) -> None:
            pace(event)
            text = describe(event, pace)
            if text is not None:
                say(progress.console, text)
            progress.update(task, description=escape(pace.line), completed=pace.ended, total=pace.runs or None)

        yield bar


def describe(event: Mapping[str, Any], pace: Pace) -> str | None:
    """Return the line that an event deserves, if any."""
    if event["event"] == "warning":
        return f"warning: {event['text']}"
    if event["event"] == "news":
        return str(event["text"])
    if event["event"] == "begin":
        kept = f", {event['ended']} of them done already" if event["ended"] else ""
        return f"{event['runs']} runs{kept}" if event["runs"] else None
    if event["event"] != "end":
        return None
    record: RunResult = event["record"]
    setting = "".join(f", {key} {value}" for key, value in record.setting.items())
    metrics = record.validation if record.kind == "tuning" else record.metrics
    found = f"failed: {record.error}" if record.error else f"{record.split} {show_metrics(metrics)}"
    if record.kind == "tuning" and record.error is None:
        found = f"validation {show_metrics(metrics)}"
    return f"{record.label}{setting}  {record.target}  seed {record.seed}  {found}  ({pace.line})"
