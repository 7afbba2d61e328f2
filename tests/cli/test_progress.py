"""One model of progress, with the time left, and how it is shown."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from forkmerge.cli.progress import Progress, ProgressView, watching


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Counting(ProgressView):
    """Shows a count."""

    between_lines = 5.0

    def take(self, event: Mapping[str, Any]) -> str | None:
        if not self.progress.parts:
            self.progress.add("all", "steps", 10)
            self.progress.start("all")
        self.progress.advance("all", event["count"])
        return None

    def stand(self) -> str:
        return f"{self.progress.parts['all'].done:g} of 10"


def test_nothing_is_left_of_no_work_and_nothing_known_before_anything_was_done():
    progress = Progress()
    assert (progress.seconds_left, progress.share, progress.time_left) == (None, None, "")
    progress.add("a", "steps", 10)
    assert (progress.seconds_left, progress.share, progress.time_left) == (None, None, "")


def test_kinds_go_at_their_own_pace_and_several_processes_share_the_rest():
    progress = Progress(workers=2)
    for key, kind in (("a", "slow"), ("b", "fast"), ("c", "fast"), ("d", "unseen")):
        progress.add(key, kind, 10)
    progress.spend("a", 5, 20.0)
    progress.spend("b", 10, 10.0)
    # a: 5 left at 4 s; c: 10 at 1 s; d: 10 at the mean, 30 s for 15.
    assert progress.seconds_left == (20 + 10 + 20) / 2
    assert progress.share == 15 / (15 + 25)
    assert progress.time_left == "25 s left"
    for key in ("c", "d"):
        progress.drop(key)
    assert progress.seconds_left == 20.0  # one part is left, which two processes do not share
    progress.end("a")
    assert (progress.seconds_left, progress.share, progress.time_left) == (0.0, 1.0, "")


def test_a_part_under_way_is_believed_to_go_on_until_it_is_overdue():
    clock = Clock()
    progress = Progress(clock=clock)
    for key in "ab":
        progress.add(key, "steps", 10)
        progress.start(key)
        clock.now += 10
        if key == "a":
            progress.end(key)
    clock.now = 17.0
    assert progress.seconds_left == 3.0
    clock.now = 30.0
    assert progress.seconds_left == 0.0


def test_lines_come_where_events_deserve_none_for_a_while():
    clock, text = Clock(), io.StringIO()
    with watching(Console(file=text), Counting(clock=clock)) as show:
        for count in range(11):
            show({"event": "count", "count": count})
            clock.now += 2
    assert text.getvalue().splitlines() == ["3 of 10  14 s left", "6 of 10  8 s left", "9 of 10  2 s left"]


def test_a_pretraining_comes_first_with_a_pace_of_its_own():
    clock, text = Clock(), io.StringIO()
    view = Counting(clock=clock)
    with watching(Console(file=text), view) as show:
        show({"event": "news", "text": "another process is pre-training"})
        show({"event": "pretraining", "name": "m:r", "step": 20, "steps": 100, "begins": True})
        for step in (40, 60, 80, 100):
            clock.now += 8
            show({"event": "pretraining", "name": "m:r", "step": step, "steps": 100, "begins": False})
        show({"event": "warning", "text": "[red]odd[/red]"})
    assert text.getvalue().splitlines() == [
        "another process is pre-training",
        "pre-training on m:r, once: 100 steps",
        "pre-training on m:r: step 60/100  16 s left",
        "pre-training on m:r: step 100/100",
        "warning: [red]odd[/red]",
    ]
    assert view.progress.parts == {}
