"""What records say over rounds, against direct computation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

import forkmerge as fm
from forkmerge.analysis import dynamics
from forkmerge.experiments.summary import Cost, Standing, Summary
from forkmerge.report.merge_figures import learning_curves
from problems import (
    fit,
    shared_problem,
)

BRANCHES = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 1.0}, "odd": {"tgt": 1.0, "odd": 1.0}}


def test_coefficients_over_rounds_are_means_over_runs():
    runs = [fit(fm.ForkMerge(BRANCHES, interval=4), seed=seed) for seed in (0, 1)]
    found = dynamics.coefficient_history(runs)
    assert found.steps == (4, 8, 12)
    for i in range(3):
        values = [run.searched[i].coefficients["joint"] for run in runs]
        assert found.means["joint"][i] == pytest.approx(sum(values) / 2)
        assert found.stds["joint"][i] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
        assert found.relevance["tgt"][i] == pytest.approx(1)
    curve = dynamics.learning_curve("ForkMerge", runs)
    assert curve.means[-1] == pytest.approx(sum(run.score for run in runs) / 2)
    effect = dynamics.interval_effect({4: runs, 2: [fit(fm.ForkMerge(BRANCHES, interval=2))]})
    assert effect.intervals == (2, 4)
    assert effect.runs == (1, 2)
    diverged = replace(runs[1], score=math.nan)
    assert math.isnan(dynamics.interval_effect({4: [runs[0], diverged]}).means[0])
    with pytest.raises(fm.ProblemError, match="share the steps"):
        dynamics.coefficient_history([runs[0], fit(fm.ForkMerge(BRANCHES, interval=2))])


def test_a_curve_of_an_error_is_that_error():
    runs = [fit(fm.SingleTask(interval=4), shared_problem(metrics=fm.nll), seed=seed) for seed in (0, 1)]
    curve = dynamics.learning_curve("STL", runs)
    assert curve.metric == "nll"
    assert curve.means[-1] == pytest.approx(sum(run.metrics["nll"] for run in runs) / 2)
    figure = learning_curves([curve])
    assert figure.panels[0].y.title == "validation nll"
    assert figure.panels[0].series[0].y == curve.means
    assert "Lower is better of nll." in figure.caption
    scored = learning_curves([dynamics.learning_curve("STL", [fit(fm.SingleTask(interval=4))])])
    assert (scored.panels[0].y.title, "Lower" in scored.caption) == ("validation score", False)


def test_curves_of_several_metrics_are_changes_against_one_baseline():
    problem = shared_problem(metrics={"nll": fm.nll, "accuracy": fm.accuracy})
    directions = problem.target_validation.directions
    alone = [fit(fm.SingleTask(interval=4), problem, seed=seed) for seed in (0, 1)]
    joint = [fit(fm.Joint(interval=4), problem, seed=seed) for seed in (0, 1)]
    criterion = dynamics.common_criterion(directions, alone)
    base = {name: (alone[0].metrics[name] + alone[1].metrics[name]) / 2 for name in directions}

    def change(metrics):
        return sum(sign * (metrics[name] / base[name] - 1) for name, sign in directions.items()) / 2

    curve = dynamics.learning_curve("EW", joint, criterion)
    for place, mean in enumerate(curve.means):
        assert mean == pytest.approx(sum(change(run.searched[place].metrics) for run in joint) / 2)
    assert dynamics.learning_curve("STL", alone, criterion).means[-1] == pytest.approx(0, abs=1e-12)
    effect = dynamics.interval_effect({4: joint}, criterion=criterion)
    assert effect.means[0] == pytest.approx(sum(change(run.metrics) for run in joint) / 2)
    for look in (lambda: dynamics.learning_curve("EW", joint), lambda: dynamics.interval_effect({4: joint})):
        with pytest.raises(fm.ProblemError, match=r"several metrics \(nll, accuracy\).* criterion=common_criterion"):
            look()
    with pytest.raises(fm.ProblemError, match="the baseline has no run"):
        dynamics.common_criterion(directions, [])


@dataclass(frozen=True)
class GridPoint:
    task_weights: dict
    scores: dict


def test_a_projection_marks_the_front_of_the_grid_and_costs_come_from_the_summary():
    grid = [GridPoint({"a": 1, "b": w}, {"a": 1 - w, "b": w}) for w in (0.25, 0.75)]
    found = dynamics.pareto_projection("a", "b", grid, {"good": {"a": 0.9, "b": 0.6}, "bad": {"a": 0.1, "b": 0.1}})
    assert [(p.label, p.is_front, p.is_grid) for p in found.points] == [
        ("1 : 0.25", True, True),
        ("1 : 0.75", True, True),
        ("good", False, False),
        ("bad", False, False),
    ]
    bare = dynamics.pareto_projection("a", "b", [], {"good": {"a": 0.9, "b": 0.6}, "bad": {"a": 0.1, "b": 0.1}})
    assert [p.is_front for p in bare.points] == [True, False]
    standing = Standing("ew", "EW", {}, None, None, None, None)
    costs = {"ew": Cost(1, None, 1.5, None, 0.0)}
    (cost,) = dynamics.method_costs(Summary("STL", 0.95, [0], "test", False, {}, {}, [standing], costs))
    assert (cost.label, cost.time, cost.change) == ("EW", 1.5, None)
