"""From the records of runs to the results that figures are made of."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from forkmerge.analysis.merge_results import CoefficientHistory, LearningCurve
from forkmerge.run import Round

Runs = Sequence[Sequence[Round]]
"""The searched rounds of every run."""


def coefficient_history(target: str, runs: Runs) -> CoefficientHistory:
    """Return mean and spread of the coefficients over runs that merge at the same steps."""
    rounds = [list(parallel) for parallel in zip(*runs, strict=False)]  # [rounds][runs]; the shortest run ends it
    branches = tuple(dict.fromkeys(name for found in rounds for r in found for name in r.branches))
    tasks = tuple(dict.fromkeys(task for found in rounds for r in found for task in r.relevance))
    shares = {name: [[r.coefficients.get(name, 0.0) for r in found] for found in rounds] for name in branches}
    return CoefficientHistory(
        target=target,
        runs=len(runs),
        steps=tuple(found[0].end for found in rounds),
        branches=branches,
        means={name: tuple(fmean(values) for values in found) for name, found in shares.items()},
        stds={name: tuple(_std(values) for values in found) for name, found in shares.items()},
        relevance={task: tuple(fmean(r.relevance.get(task, 0.0) for r in found) for found in rounds) for task in tasks},
    )


def learning_curve(label: str, target: str, runs: Runs) -> LearningCurve:
    """Return mean and spread of the validation score over runs, at the steps that all of them scored."""
    scores = [{r.end: r.score for r in run if r.score is not None} for run in runs]
    steps = sorted(set.intersection(*(set(found) for found in scores))) if scores else []
    values = [[found[step] for found in scores] for step in steps]
    means, stds = tuple(fmean(found) for found in values), tuple(_std(found) for found in values)
    return LearningCurve(label, target, tuple(steps), means, stds, len(runs))


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
