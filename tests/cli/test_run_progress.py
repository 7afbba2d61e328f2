"""How far a run is: steps and merges that remain, lines, a bar."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from rich.console import Console

from forkmerge.cli.progress import watching
from forkmerge.cli.run_progress import RunView


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def events(clock: Clock, observe: Callable[[Any], None]) -> None:
    """Two rounds of two branches of 10 steps, 0.1 s each, and a merge of 3 s."""
    position = {"phase": "search", "branches": ["a", "[b]"], "until": 20}
    observe({"event": "start", **position, "round": 1})
    observe({"event": "checkpoint", **position, "round": 1, "step": 0})
    for index in (1, 2):
        for branch in ("a", "[b]"):
            clock.now += 1.0
            here = {"phase": "search", "round": index, "branch": branch, "step": 10 * index, "seconds": 1.0}
            observe({"event": "segment", **here})
        clock.now += 3.0
        observe({"event": "round", **position, "end": 10 * index, "score": index / 10, "coefficients": {"a": 1.0}})
        observe({"event": "checkpoint", **position, "round": index + 1, "step": 10 * index})


def test_the_time_left_is_what_remains_at_the_pace_so_far() -> None:
    clock = Clock()
    view = RunView(20, 2, refit=False, clock=clock)
    left: list[tuple[int, float | None]] = []

    def observe(event: Any) -> None:
        view(event)
        left.append((view.remaining, view.progress.seconds_left))

    events(clock, observe)
    assert left[:3] == [(40, None), (40, None), (30, 3.0)]
    assert left[3:6] == [(20, 2.0), (20, 2.0 + 2 * 3.0), (20, 2.0 + 3.0)]
    assert left[-1][0] == 0
    assert view.checkpoint == "step 20"


def test_a_refit_and_a_floor_are_part_of_what_remains() -> None:
    view = RunView(20, 2, refit=True, clock=Clock())
    position = {"phase": "search", "round": 1, "step": 0, "until": 20}
    view({"event": "checkpoint", **position, "branches": ["a", "b", "floor"]})
    assert view.remaining == 60 + 40
    view({"event": "resume", **position, "step": 10, "round": 2, "branches": ["a", "b", "floor"]})
    assert view.remaining == 30 + 40
    view({"event": "checkpoint", "phase": "refit", "round": 3, "step": 0, "until": 20, "branches": ["a", "b"]})
    assert (view.remaining, view.round) == (40, 1)
    view({"event": "checkpoint", "phase": "done", "round": 5, "step": 20, "until": 20, "branches": ["a", "b"]})
    assert view.remaining == 0


def test_plain_lines_come_once_per_round_and_otherwise_rarely() -> None:
    clock, text = Clock(), io.StringIO()
    with watching(Console(file=text), RunView(20, 2, refit=False, clock=clock)) as observe:
        events(clock, observe)
        clock.now += 10
        observe({"event": "warning", "text": "[red]odd[/red]"})
    assert text.getvalue().splitlines() == [
        "search 1/2  step 10  score 0.1  a 1.00",
        "search 2/2  step 20  score 0.2  a 1.00",
        "warning: [red]odd[/red]",
    ]
    text.truncate(0)
    clock.now = 0.0
    with watching(Console(file=text), RunView(20, 1, refit=False, clock=clock)) as observe:
        observe({"event": "start", "phase": "search", "round": 1, "branches": ["a"]})
        for step in range(1, 20):
            clock.now += 1.0
            here = {"phase": "search", "round": 1, "branch": "a", "step": step, "seconds": 1.0}
            observe({"event": "segment", **here})
    lines = text.getvalue().replace("\0", "").splitlines()
    assert [re.findall(r"step (\d+)/20", line) for line in lines] == [["5"], ["10"], ["15"]]


def test_a_terminal_gets_a_bar_with_branch_round_step_score_and_time_left() -> None:
    clock, text = Clock(), io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, color_system=None)
    with watching(console, RunView(20, 2, refit=False, clock=clock)) as observe:
        events(clock, observe)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text.getvalue())
    assert "search 1/2  step 10  score 0.1  a 1.00\n" in shown
    assert "search 2/2  [b]  step 20/20  score 0.2" in shown
