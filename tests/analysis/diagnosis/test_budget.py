"""What fits into a budget of time, and what the pieces of a diagnosis take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import forkmerge as fm
from compare_problem import recipe, test_reads
from forkmerge.algorithms import Joint, SingleTask
from forkmerge.analysis.advice import ProbeSettings
from forkmerge.analysis.diagnosis import budget
from forkmerge.analysis.transfer_runs import SeededSource
from forkmerge.errors import ConfigError

COSTS = budget.PieceTimes(alone=0.01, pairs={"a": 0.02, "b": 0.02}, fixed=0.5, loading=1.0)
PROBE = ProbeSettings(100, 50)
SMALL = budget.DiagnosisPlan(2, (0.5, 1.0), 4, 6, 1, 2, 2, ProbeSettings(2, 1), 1, 1.0)
WHOLE = replace(SMALL, seeds=1, weights=(1.0,), steps=6, one_step=0, pictures=4)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("45", 45)])
def test_a_budget_is_a_duration(text: str, seconds: float) -> None:
    assert budget.seconds_from(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0m", "-3m", "5 weeks"])
def test_a_budget_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="20m"):
        budget.seconds_from(text)


def test_a_larger_budget_never_buys_less_and_every_plan_fits() -> None:
    plans = [budget.plan_budget(COSTS, PROBE, 1000, seconds, 2) for seconds in (60, 120, 300, 600, 3600, 36000)]
    for plan, seconds in zip(plans, (60, 120, 300, 600, 3600, 36000), strict=True):
        assert plan.estimate <= seconds
    ranks = [(plan.steps, plan.seeds * len(plan.weights)) for plan in plans]
    assert ranks == sorted(ranks)
    assert plans[0].steps < plans[-1].steps == 1000
    assert all(plan.weights[-1] == 1 for plan in plans)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("pair", [0.011, 0.02, 0.2])
def test_a_budget_is_used_up_before_runs_are_shortened_or_seeds_saved(workers: int, pair: float) -> None:
    costs = replace(COSTS, pairs={"a": pair, "b": pair})
    least = budget.plan_budget(costs, PROBE, 1000, 1e9, workers)
    for seconds in (60, 90, 120, 180, 300, 450, 600, 1200, 3600):
        try:
            plan = budget.plan_budget(costs, PROBE, 1000, seconds, workers)
        except ConfigError:
            continue
        assert plan.estimate <= seconds
        more = replace(plan, seeds=plan.seeds + 1)
        if plan.steps < plan.full_steps:
            more = replace(plan, steps=plan.steps + 1)
            fewest = replace(plan, seeds=2, weights=(1.0,), steps=1000, merges=1)
            assert budget.estimated(fewest, costs) > seconds  # even the least whole plan does not fit
        assert plan.seeds == least.seeds or budget.estimated(more, costs) > seconds


def test_a_budget_that_buys_nothing_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"too small.*--budget \d+m"):
        budget.plan_budget(COSTS, PROBE, 100000, 5, 1)


def test_a_plan_costs_what_its_pieces_cost() -> None:
    works = budget.piece_seconds(SMALL, COSTS)
    kinds = [key[0] for key in works]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "single task": 2,
        "transfer": 8,
        "probe": 2,
        "ForkMerge": 1,
        "gradients": 1,
    }
    assert works["transfer", "a", 0.5, 1] == pytest.approx(0.5 + 4 * 0.02)
    assert [key[3] for key in budget.longest_first(works)] == sorted(key[3] for key in works)


def test_an_estimate_is_the_work_of_all_processes_or_the_longest_piece_and_their_start() -> None:
    plans = {workers: budget.plan_budget(COSTS, PROBE, 1000, 1e6, workers) for workers in (1, 2, 1000)}
    seconds = budget.piece_seconds(plans[1], COSTS).values()
    assert plans[1].estimate == pytest.approx(1.1 * sum(seconds))
    assert plans[2].estimate == pytest.approx(1.1 * sum(seconds) / 2 + 6 + 1)
    assert plans[1000].estimate == pytest.approx(max(seconds) + 6 + 1)


def test_pictures_are_planned_for_whole_runs_that_leave_time_for_them() -> None:
    plans = [budget.plan_budget(COSTS, PROBE, 1000, seconds, 2) for seconds in range(40, 600, 20)]
    assert not any(plan.pictures for plan in plans if plan.steps < plan.full_steps)
    whole = [bool(plan.pictures) for plan in plans if plan.steps == plan.full_steps]
    assert whole == sorted(whole)
    assert set(whole) == {False, True}
    works = budget.piece_seconds(WHOLE, COSTS)
    mixtures, lines, maps = 66, 2 * 2 * 12, 2 * (6 + 60 * 0.01)
    assert works["pictures", "", 0.0, 0] == pytest.approx(3 * 0.5 + 6 * 0.05 + (mixtures + lines) * 0.25 + maps)
    assert not any(kind == "pictures" for kind, *_ in budget.piece_seconds(SMALL, COSTS))


def test_times_of_pieces_are_the_costs_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def estimate(made: fm.Recipe, *, workers: int, timed_steps: int) -> Any:
        asked.append((made.algorithm, workers, timed_steps, made.options["threads"]))
        weights = dict(made.algorithm.task_weights) if isinstance(made.algorithm, Joint) else {}
        step = 0.3 if "aux" in weights else 0.1 if weights else 0.2
        return SimpleNamespace(
            branches=[SimpleNamespace(seconds_per_step=step)], seconds={"validation": 6.0}, passes={"total": 2.0}
        )

    monkeypatch.setattr(budget, "estimate_run", estimate)
    times = budget.time_pieces(recipe)
    alone, *pairs = asked
    assert isinstance(alone[0], SingleTask)
    assert [set(pair[0].task_weights) for pair in pairs] == [{"tgt", "aux"}, {"tgt", "odd"}]
    assert {each[1:] for each in asked} == {(1, 10, 1)}
    assert times.alone == 0.2
    assert times.pairs == {"aux": 0.3, "odd": 0.2}  # a pair takes no less than the target alone
    assert times.fixed == pytest.approx(6.0 + 3 * 3.0, abs=1.0)  # two passes, and three more to measure what came out


def test_timing_reads_no_test_split() -> None:
    test_reads.clear()
    source = dict(fm.load_recipe("compare_problem:recipe").source)
    times = budget.time_pieces(SeededSource(source, "tgt"))
    assert not test_reads
    assert min(times.alone, times.fixed, times.loading, *times.pairs.values()) > 0
