"""How the command shows progress: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console

from forkmerge.algorithms.events import Event, Notice, PretrainingProgress
from forkmerge.algorithms.events.progress import ProgressView
from forkmerge.cli.progress import watching


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, kw_only=True)
class Count(Event):
    count: int


class Counting(ProgressView):
    """Shows a count."""

    between_lines = 5.0

    def take(self, event: Event) -> str | None:
        if not self.progress.parts:
            self.progress.add("all", "steps", 10)
            self.progress.start("all")
        assert isinstance(event, Count)
        self.progress.advance("all", event.count)
        return None

    def stand(self) -> str:
        return f"{self.progress.parts['all'].done:g} of 10"


def test_lines_come_where_events_deserve_none_for_a_while():
    clock, text = Clock(), io.StringIO()
    with watching(Console(file=text), Counting(clock=clock)) as show:
        for count in range(11):
            show(Count(count=count))
            clock.now += 2
    assert text.getvalue().splitlines() == ["3 of 10  14 s left", "6 of 10  8 s left", "9 of 10  2 s left"]


def test_a_pretraining_comes_first_with_a_pace_of_its_own():
    clock, text = Clock(), io.StringIO()
    view = Counting(clock=clock)
    with watching(Console(file=text), view) as show:
        show(Notice(text="another process is pre-training"))
        show(PretrainingProgress(name="m:r", step=20, steps=100, begins=True))
        for step in (40, 60, 80, 100):
            clock.now += 8
            show(PretrainingProgress(name="m:r", step=step, steps=100, begins=False))
        show(Notice(text="[red]odd[/red]", is_warning=True))
    assert text.getvalue().splitlines() == [
        "another process is pre-training",
        "pre-training on m:r, once: 100 steps",
        "pre-training on m:r: step 60/100  16 s left",
        "pre-training on m:r: step 100/100",
        "warning: [red]odd[/red]",
    ]
    assert view.progress.parts == {}
