"""What records say: coefficients over rounds, learning curves, the effect of Δt, costs, Pareto projections."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from forkmerge.algorithms import pareto_front
from forkmerge.algorithms.run_record import Run, shown_score
from forkmerge.algorithms.weight_grid import Point
from forkmerge.analysis.merge_results import (
    CoefficientHistory,
    IntervalEffect,
    LearningCurve,
    MethodCost,
    ParetoPoint,
    ParetoProjection,
)
from forkmerge.errors import ProblemError
from forkmerge.experiments.paired_statistics import spread
from forkmerge.experiments.summary import Summary
from forkmerge.problem.metrics import Criterion

T = TypeVar("T", str, tuple[int, ...])


def coefficient_history(runs: Sequence[Run]) -> CoefficientHistory:
    """Return how the coefficients of runs that differ in their seed went over rounds.

    A branch that was pruned, or faulty, has coefficient 0.

    References:
        ForkMerge, Fig. 9.
    """
    searched = [run.searched for run in runs]
    target = _same("target", [run.target for run in runs])
    steps = _same("steps of the merges", [tuple(r.end for r in rounds) for rounds in searched])
    each = [r for rounds in searched for r in rounds]
    branches = tuple(
        dict.fromkeys([*(n for r in each for n in r.branches), *(n for r in each for n in r.coefficients)])
    )
    tasks = tuple(dict.fromkeys(task for rounds in searched for r in rounds for task in r.relevance))
    values = {
        name: [[rounds[i].coefficients.get(name, 0.0) for rounds in searched] for i in range(len(steps))]
        for name in branches
    }
    return CoefficientHistory(
        target=target,
        runs=len(runs),
        steps=steps,
        branches=branches,
        means={name: tuple(map(fmean, per_round)) for name, per_round in values.items()},
        stds={name: tuple(map(_std, per_round)) for name, per_round in values.items()},
        relevance={
            task: tuple(fmean(rounds[i].relevance.get(task, 0.0) for rounds in searched) for i in range(len(steps)))
            for task in tasks
        },
    )


def common_criterion(directions: Mapping[str, int], baseline: Sequence[Run]) -> Criterion:
    """Return the score by which runs with several metrics compare: changes against the means of a baseline's runs.

    A run's own scores are changes against its own first round, so those of two runs have nothing in common.

    Args:
        directions: +1 or −1 by metric, such as `problem.target_validation.directions`.
        baseline: Runs of single-task training.
    """
    criterion = Criterion(directions)
    if not criterion.needs_reference:
        return criterion
    if not baseline or any(name not in run.metrics for run in baseline for name in directions):
        raise ProblemError(f"the baseline has no run with the validation metrics {', '.join(directions)}.")
    return criterion.with_reference({name: fmean(run.metrics[name] for run in baseline) for name in directions})


def learning_curve(label: str, runs: Sequence[Run], criterion: Criterion | None = None) -> LearningCurve:
    """Return the validation score over steps, mean ± standard deviation over runs that differ in their seed.

    Where the score is one error, turned round, it is that error. Steps at which some run has no score (every branch was
    faulty) are left out.

    Args:
        label: The method.
        runs: Its runs.
        criterion: The score that all methods share, from `common_criterion`; needed for several metrics.

    References:
        ForkMerge, Fig. 11.
    """
    target = _same("target", [run.target for run in runs])
    metric, sign = shown_score([r for run in runs for r in run.searched])
    curves = [
        {r.end: sign * _score(run, r.score, r.metrics, criterion) for r in run.searched if r.score is not None}
        for run in runs
    ]
    steps = tuple(step for step in curves[0] if all(step in scores for scores in curves))
    values = [[scores[step] for scores in curves] for step in steps]
    return LearningCurve(label, target, steps, tuple(map(fmean, values)), tuple(map(_std, values)), len(runs), metric)


def interval_effect(
    runs: Mapping[int, Sequence[Run]], metric: str | None = None, criterion: Criterion | None = None
) -> IntervalEffect:
    """Return what Δt does to the result.

    Args:
        runs: `{Δt: runs that differ in their seed}`.
        metric: A metric of the test split, or of validation where it was not measured; the validation score where None.
        criterion: That score, from `common_criterion`; needed for several metrics.

    References:
        ForkMerge, Fig. 7.
    """
    target = _same("target", [run.target for group in runs.values() for run in group])
    values = {interval: [_value(run, metric, criterion) for run in runs[interval]] for interval in sorted(runs)}
    return IntervalEffect(
        target=target,
        metric=metric or "score",
        intervals=tuple(values),
        means=tuple(map(fmean, values.values())),
        stds=tuple(map(_std, values.values())),
        runs=tuple(map(len, values.values())),
    )


def method_costs(summary: Summary) -> list[MethodCost]:
    """Return what every method of a comparison costs and gives.

    References:
        ForkMerge, Fig. 10.
    """
    changes = {standing.method: standing.change for standing in summary.overall}
    labels = {standing.method: standing.label for standing in summary.overall}
    result = []
    for method, cost in summary.costs.items():
        change = changes.get(method)
        mean = None if change is None else change.mean
        result.append(MethodCost(labels.get(method, method), cost.time, mean, cost.branches, cost.memory))
    return result


def place_of(task: str, metrics: Mapping[str, float], directions: Mapping[str, int]) -> tuple[str, float]:
    """Return the axis of a task and where metrics lie on it: its first metric, or 1 / that where lower is better.

    So mIoU, 1 / absolute error and 1 / mean angle for the tasks of NYUv2, as in the paper's figure.

    Args:
        task: The task.
        metrics: Its metrics.
        directions: +1 or −1 by metric.

    References:
        ForkMerge, Fig. 12.
    """
    name = next(iter(directions))
    if directions[name] > 0:
        return f"{task}: {name}", metrics[name]
    return f"{task}: 1 / {name}", 1 / metrics[name] if metrics[name] else math.nan


def pareto_projection(
    first: str, second: str, grid: Sequence[Point], methods: Mapping[str, Mapping[str, float]] | None = None
) -> ParetoProjection:
    """Return the scores of two tasks: of a grid search's points, and of methods beside them.

    The front is the grid's, so that one sees which methods lie beyond it; without a grid it is the methods'.

    Args:
        first: Task on the x axis.
        second: Task on the y axis.
        grid: Points of `WeightGrid`.
        methods: `{label: {task: score}}`.

    References:
        ForkMerge, Fig. 12.
    """
    named: list[tuple[str, Mapping[str, float], bool]]
    named = [(" : ".join(f"{w:g}" for w in p.task_weights.values()), p.scores, True) for p in grid]
    named += [(label, scores, False) for label, scores in (methods or {}).items()]
    able = [{"x": scores[first], "y": scores[second]} for _, scores, is_grid in named if is_grid or not grid]
    front = set(pareto_front(able))  # grid points come first, so that positions are the same
    points = tuple(
        ParetoPoint(label, scores[first], scores[second], index in front, is_grid)
        for index, (label, scores, is_grid) in enumerate(named)
    )
    return ParetoProjection(first, second, points)


def _score(run: Run, own: float, metrics: Mapping[str, float], criterion: Criterion | None) -> float:
    """Return a score that compares with other runs'; one metric is its own score in every run."""
    if criterion is not None and len(criterion.directions) > 1:
        return criterion.score(metrics)
    if len(metrics) > 1:
        raise ProblemError(
            f"the run with seed {run.seed} has several metrics ({', '.join(metrics)}), scored against its own first "
            "round: pass criterion=common_criterion(directions, runs of single-task training)."
        )
    return own


def _value(run: Run, metric: str | None, criterion: Criterion | None) -> float:
    if metric is None:
        if run.score is None:
            raise ProblemError(f"the run with seed {run.seed} has no validation score: name a metric.")
        return _score(run, run.score, run.metrics, criterion)
    metrics = run.metrics if run.test is None else run.test
    if metric not in metrics:
        raise ProblemError(f"the run with seed {run.seed} has no metric {metric!r}. It has: {', '.join(metrics)}.")
    return metrics[metric]


def _std(values: Sequence[float]) -> float:
    return spread(values).std or 0.0


def _same(what: str, values: Sequence[T]) -> T:
    if not values:
        raise ProblemError("there is no run to look at.")
    if len(set(values)) > 1:
        raise ProblemError(f"runs must share the {what}, got {' and '.join(map(str, dict.fromkeys(values)))}.")
    return values[0]
