"""What a comparison would cost is the sum of what its runs would cost."""

from __future__ import annotations

from typing import Any

import pytest

from forkmerge.errors import ConfigError
from forkmerge.experiments import cost_of_comparison
from forkmerge.experiments.comparison import plan_comparison
from forkmerge.experiments.cost_of_comparison import ComparisonCost, estimate_comparison
from forkmerge.experiments.cost_of_run import RunCost, estimate_run
from forkmerge.experiments.recipe import Recipe

STEPS = 6


@pytest.fixture
def cost_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Estimates a comparison whose every step takes a second, and 100 bytes per branch."""

    def estimate(recipe: Recipe, **options: Any) -> RunCost:
        cost = estimate_run(recipe, **options)
        seconds, memory = float(cost.branch_steps["total"]), 100 * len(cost.branches)
        return RunCost(**{**vars(cost), "seconds": {"total": seconds}, "memory": {"total": memory}})

    monkeypatch.setattr(cost_of_comparison, "estimate_run", estimate)

    def cost(workers: int = 1, **options: Any) -> ComparisonCost:
        return estimate_comparison(plan_comparison("compare_problem:recipe", **options), workers)

    return cost


def test_runs_of_all_targets_seeds_and_settings_are_added_up(cost_of: Any) -> None:
    cost = cost_of(methods="forkmerge", targets="tgt,aux", seeds=3, tune={"interval": [1, 2]}, tune_seeds=2)
    stl, merged = cost.methods
    assert (stl.branches, stl.runs, stl.tuning_runs, stl.steps) == (1, 6, 0, 6 * STEPS)
    assert (merged.branches, merged.runs, merged.tuning_runs) == (2, 6, 2 * 2 * 2)
    assert merged.steps == merged.seconds == 2 * STEPS * (6 + 8)
    assert (cost.runs, cost.steps) == (6 + 14, 6 * STEPS + 2 * STEPS * 14)
    assert cost.seconds == cost.steps
    assert cost.memory == 200


def test_processes_share_the_time_down_to_the_longest_run_and_need_memory_each(cost_of: Any) -> None:
    few, many = (cost_of(workers, methods="ew,forkmerge", seeds=2) for workers in (2, 100))
    assert few.seconds == few.steps / 2
    assert many.seconds == 2 * STEPS  # one run of ForkMerge
    assert few.memory == 200 + 200
    assert many.memory == 2 * 200 + 4 * 100


def test_equal_labels_train_twice_what_was_searched(cost_of: Any) -> None:
    once, again = (cost_of(methods="forkmerge", seeds=1, equal_labels=labels).methods[1] for labels in (False, True))
    assert again.steps == 2 * once.steps


def test_what_a_run_would_refuse_names_its_method_and_target() -> None:
    plan = plan_comparison("compare_problem:recipe", methods="forkmerge[search=binary,mixtures=per_auxiliary]")
    with pytest.raises(ConfigError, match=r"ForkMerge\[mixtures=per_auxiliary,search=binary\] on 'tgt': .*branches"):
        estimate_comparison(plan, 1)
