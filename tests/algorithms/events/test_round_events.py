"""The events of whole runs: their order, on any executor, after a resume, and that nobody can change a run by them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_run
from forkmerge.algorithms.events import (
    BranchScored,
    BranchTrained,
    CheckpointWritten,
    Event,
    Merged,
    ModelSelected,
    PhaseStarted,
    ProbeScored,
    RoundFinished,
    RunFinished,
    RunResumed,
    RunStarted,
    StepProgress,
    TrainingFailed,
)
from problems import Stopped, diverging_problem, fit, noisy_net, stop_at

ALGORITHM = fm.ForkMerge("per_auxiliary", interval=6, refit=True, floor=True, search=fm.Fixed((0.5, 0.3, 0.2)))


def events_of(algorithm: fm.Algorithm | None = None, **options: Any) -> list[Any]:
    events: list[Any] = []
    fit(algorithm or ALGORITHM, on_event=events.append, **options)
    return events


def timeless(events: list[Any]) -> list[Event]:
    """What does not depend on clocks, on how often an executor reports, or on where a run is kept."""
    kept: list[Event] = []
    for event in events:
        if isinstance(event, StepProgress | RunStarted | RunResumed):
            continue
        if isinstance(event, RoundFinished):
            event = replace(event, record=replace(event.record, seconds={}))
        kept.append(replace(event, seconds={}) if isinstance(event, RunFinished) else event)
    return kept


def test_a_run_tells_everything_in_order() -> None:
    branches = ["alone", "aux", "odd"]
    searched = (
        [StepProgress] * 3 + [BranchTrained] * 3 + [BranchScored] * 3 + [Merged, RoundFinished, CheckpointWritten]
    )
    with_floor = [StepProgress] * 4 + searched[3:]
    refitted = [StepProgress] * 3 + [BranchTrained] * 3 + [Merged, RoundFinished, CheckpointWritten]
    events = events_of()
    assert [type(event) for event in events] == [
        *(RunStarted, PhaseStarted, CheckpointWritten, *searched, *with_floor),
        *(ModelSelected, PhaseStarted, CheckpointWritten, *refitted, StepProgress, *refitted, RunFinished),
    ]
    search, refit = (event for event in events if isinstance(event, PhaseStarted))
    assert (search.phase, refit.phase) == ("search", "refit")
    assert list(search.branches) == branches
    assert search.branches["aux"] == {"tgt": 1.0, "aux": 1.0}
    assert search.has_floor
    steps = [(event.phase, event.round, event.step) for event in events if isinstance(event, Merged)]
    assert steps == [("search", 1, 6), ("search", 2, 12), ("refit", 3, 6), ("refit", 4, 12)]


def test_the_numbers_are_those_of_the_run() -> None:
    events: list[Any] = []
    run = fit(ALGORITHM, on_event=events.append)
    assert [event.record for event in events if isinstance(event, RoundFinished)] == run.rounds
    merges = [event for event in events if isinstance(event, Merged)]
    assert [(e.coefficients, e.score, e.relevance) for e in merges] == [
        (r.coefficients, r.score, r.relevance) for r in run.rounds
    ]
    for kind, name in ((BranchScored, "score"), (BranchTrained, "losses")):
        told = {(e.round, e.branch): getattr(e, name) for e in events if isinstance(e, kind)}
        rounds = run.searched if kind is BranchScored else run.rounds
        assert told == {(r.index, b): getattr(record, name) for r in rounds for b, record in r.branches.items()}
    selected, finished = next(e for e in events if isinstance(e, ModelSelected)), events[-1]
    assert (selected.score, selected.metrics) == (run.score, run.metrics)
    assert (finished.final, finished.score, finished.step) == ("refit", run.score, 12)


def test_they_are_the_same_with_worker_processes() -> None:
    assert timeless(events_of(workers=2)) == timeless(events_of())


@pytest.mark.parametrize("count", [2, 5, 9, 14, 20])
def test_a_resumed_run_goes_on_from_its_checkpoint_and_repeats_nothing_before(count: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path / "run", "checkpoint_every": 3}
    whole, before, after = timeless(events_of(checkpoint_every=3)), list[Any](), list[Any]()
    stop = stop_at(count)

    def tell(event: Event) -> None:
        before.append(event)
        stop(event)

    with pytest.raises(Stopped):
        fit(ALGORITHM, on_event=tell, **options)
    fit(ALGORITHM, on_event=after.append, resume=True, **options)
    start, resumed, *_ = after
    assert start.is_resumed
    assert isinstance(resumed, RunResumed)
    last = max(index for index, event in enumerate(before) if isinstance(event, CheckpointWritten))
    assert (before[last].phase, before[last].steps) == (resumed.phase, resumed.steps)
    assert timeless(before[: last + 1]) + timeless(after) == whole
    overlap = timeless(before[last + 1 :])
    assert timeless(after)[: len(overlap)] == overlap  # what had been told before the kill comes again, as it was


def test_a_run_that_has_ended_says_only_that(tmp_path: Path) -> None:
    fit(folder=tmp_path / "run")
    (event,) = events_of(fm.ForkMerge("mixed", interval=4), folder=tmp_path / "run", resume=True)
    assert isinstance(event, RunFinished)


def test_ranking_runs_come_first() -> None:
    events = events_of(fm.ForkMerge(fm.NestedTopK(probe_steps=3), interval=4))
    assert [type(event) for event in events[:4]] == [RunStarted, ProbeScored, ProbeScored, PhaseStarted]


def test_a_run_that_learned_nothing_says_why() -> None:
    events: list[Any] = []
    with pytest.raises(fm.RunFailed) as failed:
        fit(fm.SingleTask(interval=4), diverging_problem(1, "tgt"), on_event=events.append)
    assert isinstance(events[-1], TrainingFailed)
    assert events[-1].reason == str(failed.value)


def test_parts_of_a_composed_run_are_named() -> None:
    events = events_of(fm.PostTrain())
    assert list(dict.fromkeys(event.part for event in events)) == ["", "pretraining", "finetuning"]
    ends = [(type(event), event.part) for event in (events[0], events[-1])]
    assert ends == [(RunStarted, ""), (RunFinished, "")]
    assert events[0].branch_steps == 12


@pytest.mark.parametrize("workers", [1, 2])
def test_points_of_a_grid_are_named_in_any_process(workers: int) -> None:
    events = events_of(fm.WeightGrid(values=(0.5, 1.0)), workers=workers)
    assert len({event.part for event in events}) == 1 + 8
    assert sum(isinstance(event, RunFinished) for event in events) == 1 + 8


def test_a_callback_can_draw_and_change_what_it_gets_and_the_run_stays_what_it_is() -> None:
    def meddle(event: Event) -> None:
        torch.rand(3)
        torch.manual_seed(0)
        _empty(event)

    assert_same_run(fit(ALGORITHM, net=noisy_net, on_event=meddle), fit(ALGORITHM, net=noisy_net))


def _empty(value: Any) -> None:
    """Empty every container in a value."""
    if is_dataclass(value):
        for item in fields(value):
            _empty(getattr(value, item.name))
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _empty(inner)
        value.clear()
