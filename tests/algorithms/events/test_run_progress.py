"""How far a run is: steps and merges that remain, lines, a bar."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from forkmerge.algorithms.events import (
    CheckpointWritten,
    Event,
    Merged,
    Notice,
    OnEvent,
    PhaseStarted,
    RoundFinished,
    RunResumed,
    RunStarted,
    StepProgress,
)
from forkmerge.algorithms.events.run_progress import RunView
from forkmerge.algorithms.run_record import BranchRecord, Round
from forkmerge.cli.progress import watching


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def started(steps: int, rounds: int, **details: Any) -> RunStarted:
    return RunStarted(algorithm="ForkMerge", target="tgt", seed=0, steps=steps, rounds=rounds, **details)


def forked(*names: str, until: int = 20) -> PhaseStarted:
    return PhaseStarted(phase="search", round=1, step=0, until=until, branches={name: {"tgt": 1.0} for name in names})


def saved(
    kind: type[CheckpointWritten | RunResumed], step: int, index: int, *names: str, phase: str = "search"
) -> Event:
    return kind(phase=phase, round=index, step=step, until=20, steps=dict.fromkeys(names, step))


def trained(branch: str, step: int, index: int, **details: Any) -> StepProgress:
    return StepProgress(phase="search", round=index, step=step, branch=branch, losses={}, seconds=1.0, **details)


def ended(index: int, step: int, score: float, names: Sequence[str]) -> RoundFinished:
    branches = {name: BranchRecord({"tgt": 1.0}, score, {}, {}, step) for name in names}
    record = Round(index, "search", step - 10, step, branches, [], {"a": 1.0}, score, {"tgt": 1.0}, list(names))
    return RoundFinished(phase="search", round=index, step=step, record=record)


def test_an_error_is_told_as_one_and_not_as_a_negative_score() -> None:
    view, end = RunView(Clock()), ended(1, 10, -0.5, ("a", "b"))
    view.take(started(20, 2))
    line = view.take(replace(end, record=replace(end.record, metrics={"mae": 0.5})))
    assert line is not None
    assert "step 10  mae 0.5  a 1.00" in line
    assert view.stand().endswith("mae 0.5") or view.stand() == "starting"


def two_rounds(clock: Clock, on_event: OnEvent) -> None:
    """Two rounds of two branches of 10 steps, 0.1 s each, and a merge of 3 s."""
    names = ("a", "[b]")
    on_event(started(20, 2))
    on_event(forked(*names))
    on_event(saved(CheckpointWritten, 0, 1, *names))
    for index in (1, 2):
        for branch in names:
            clock.now += 1.0
            on_event(trained(branch, 10 * index, index))
        clock.now += 3.0
        on_event(ended(index, 10 * index, index / 10, names))
        on_event(saved(CheckpointWritten, 10 * index, index + 1, *names))


def test_the_time_left_is_what_remains_at_the_pace_so_far() -> None:
    clock = Clock()
    view = RunView(clock)
    left: list[tuple[int, float | None]] = []

    def look(event: Event) -> None:
        view(event)
        left.append((view.remaining, view.progress.seconds_left))

    two_rounds(clock, look)
    assert left[1:4] == [(40, None), (40, None), (30, 3.0)]
    assert left[4:7] == [(20, 2.0), (20, 2.0 + 2 * 3.0), (20, 2.0 + 3.0)]
    assert left[-1][0] == 0
    assert view.checkpoint == "step 20"


def test_the_time_of_a_merge_is_known_whatever_is_told_of_it_before_its_round_ends() -> None:
    clock = Clock()
    view = RunView(clock)
    for event in (started(20, 2), forked("a"), trained("a", 10, 1)):
        clock.now += 1.0
        view(event)
    clock.now += 3.0
    position: dict[str, Any] = {"phase": "search", "round": 1, "step": 10}
    view(Merged(**position, coefficients={"a": 1.0}, score=0.5, metrics={}, relevance={}, candidates=[]))
    view(ended(1, 10, 0.5, ["a"]))
    assert view.progress.parts["merging"].seconds == 3.0


def test_a_refit_and_a_floor_are_part_of_what_remains() -> None:
    view = RunView(Clock())
    view(started(20, 2, refit=True))
    view(saved(CheckpointWritten, 0, 1, "a", "b", "floor"))
    assert view.remaining == 60 + 40
    view(saved(RunResumed, 10, 2, "a", "b", "floor"))
    assert view.remaining == 30 + 40
    view(saved(CheckpointWritten, 0, 3, "a", "b", phase="refit"))
    assert (view.remaining, view.round) == (40, 1)
    view(saved(CheckpointWritten, 20, 5, "a", "b", phase="done"))
    assert view.remaining == 0


def test_parts_of_a_composed_run_share_its_work_and_are_named_even_where_they_are_trained_at_the_same_time() -> None:
    view = RunView(Clock())
    view(started(20, 2, branch_steps=40))
    for part in ("000", "001"):
        view(started(20, 2, part=part))
        view(replace(forked("joint"), part=part))
    view(trained("joint", 10, 1, part="000"))
    view(trained("joint", 10, 1, part="001"))
    view(trained("joint", 20, 2, part="000"))
    assert view.remaining == 10
    assert view.stand() == "000  search 2/2  joint  step 20/20"


def test_plain_lines_come_once_per_round_and_otherwise_rarely() -> None:
    clock, text = Clock(), io.StringIO()
    with watching(Console(file=text), RunView(clock)) as show:
        two_rounds(clock, show)
        clock.now += 10
        show(Notice(text="[red]odd[/red]", is_warning=True))
    assert text.getvalue().splitlines() == [
        "search 1/2  step 10  score 0.1  a 1.00",
        "search 2/2  step 20  score 0.2  a 1.00",
        "warning: [red]odd[/red]",
    ]
    text.truncate(0)
    clock.now = 0.0
    with watching(Console(file=text), RunView(clock)) as show:
        show(started(20, 1))
        show(forked("a"))
        for step in range(1, 20):
            clock.now += 1.0
            show(trained("a", step, 1))
    lines = text.getvalue().replace("\0", "").splitlines()
    assert [re.findall(r"step (\d+)/20", line) for line in lines] == [["5"], ["10"], ["15"]]


def test_a_terminal_gets_a_bar_with_branch_round_step_score_and_time_left() -> None:
    clock, text = Clock(), io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, color_system=None)
    with watching(console, RunView(clock)) as show:
        two_rounds(clock, show)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text.getvalue())
    assert "search 1/2  step 10  score 0.1  a 1.00\n" in shown
    assert "search 2/2  [b]  step 20/20  score 0.2" in shown
