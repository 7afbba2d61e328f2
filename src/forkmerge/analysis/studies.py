"""Transfer gains measured by training: curves over λ, confidence score discrepancy, matrices of tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product

from forkmerge.analysis.results import Gain, ShiftCurve, TransferCurve, TransferMatrix
from forkmerge.analysis.shift import shift_curve
from forkmerge.analysis.transfer import WEIGHTS, scores_of, transfer_curve, transfer_matrix
from forkmerge.analysis.transfer_runs import (
    Maker,
    Recipes,
    TransferRun,
    TransferRunResult,
    do_transfer_runs,
    equal_weights,
)
from forkmerge.errors import ProblemError
from forkmerge.experiments.paired_statistics import CONFIDENCE


def measure_transfer(
    recipes: Recipes,
    auxiliaries: Sequence[str] | None = None,
    *,
    weights: Sequence[float] = WEIGHTS,
    seeds: Iterable[int] = range(3),
    maker: Maker = equal_weights,
    label: str = "equal weights",
    steps: int | None = None,
    split: str = "validation",
    workers: int = 1,
    confidence: float = CONFIDENCE,
) -> dict[str, TransferCurve]:
    """Return TG(λ, A) of auxiliaries on a recipe's target, by auxiliary.

    The runs of a seed share first weights and batches, with the auxiliary and without.

    Args:
        recipes: From a seed to a recipe, e.g. `forkmerge.datasets.digits.recipe`.
        auxiliaries: Which; all of the problem where None.
        weights: λ > 0.
        seeds: Paired seeds.
        maker: The algorithm A, by recipe, auxiliary and λ.
        label: Its name.
        steps: Training steps; the recipe's own where None.
        split: "validation", or "test", which is read once after each fit.
        workers: Processes.
        confidence: Of the intervals.
    """
    _, curves = _measure(
        recipes,
        auxiliaries,
        weights,
        seeds,
        maker=maker,
        label=label,
        steps=steps,
        split=split,
        workers=workers,
        confidence=confidence,
    )
    return curves


def measure_shift(
    recipes: Recipes,
    auxiliaries: Sequence[str] | None = None,
    *,
    weights: Sequence[float] = WEIGHTS,
    seeds: Iterable[int] = range(3),
    maker: Maker = equal_weights,
    label: str = "equal weights",
    steps: int | None = None,
    split: str = "validation",
    workers: int = 1,
) -> dict[str, ShiftCurve]:
    """Return CSD(λ) of auxiliaries on a recipe's target, with TG(λ) of the same runs beside it, by auxiliary.

    The arguments are those of `measure_transfer`.

    References:
        ForkMerge, Section 3.2 and Fig. 3b.
    """
    runs, curves = _measure(
        recipes, auxiliaries, weights, seeds, maker=maker, label=label, steps=steps, split=split, workers=workers
    )
    shifts = {}
    for name, curve in curves.items():
        shift = shift_of(runs, curve)
        if shift is None:
            raise ProblemError(f"the predictions of {curve.target!r} are no class scores: they have no confidence.")
        shifts[name] = shift
    return shifts


def _measure(
    recipes: Recipes,
    auxiliaries: Sequence[str] | None,
    weights: Sequence[float],
    seeds: Iterable[int],
    *,
    maker: Maker,
    label: str,
    steps: int | None,
    split: str,
    workers: int,
    confidence: float = CONFIDENCE,
) -> tuple[list[TransferRunResult], dict[str, TransferCurve]]:
    """Train the target alone and with every auxiliary at every λ; return the results and the curves they show."""
    numbers = tuple(seeds)
    problem = recipes(numbers[0]).problem
    if split == "test" and problem.target not in problem.evaluations("test"):
        raise ProblemError(f"the target {problem.target!r} has no test data: pass split='validation'.")
    names = problem.auxiliaries if auxiliaries is None else tuple(auxiliaries)
    run = partial(TransferRun, recipes, steps=steps, test=split == "test")
    runs = [run(seed) for seed in numbers]
    runs += [run(s, a, w, maker=maker, label=label) for s, a, w in product(numbers, names, weights)]
    results = do_transfer_runs(runs, workers)
    curve = partial(curve_of, results, problem.target, label=label, split=split, confidence=confidence)
    return results, {name: curve(name) for name in names}


def curve_of(
    runs: Sequence[TransferRunResult],
    target: str,
    auxiliary: str,
    *,
    label: str = "equal weights",
    split: str = "validation",
    confidence: float = CONFIDENCE,
) -> TransferCurve:
    """Return the transfer curve that runs show, those of single-task training among them."""
    baseline = {run.seed: run.metrics[split] for run in runs if not run.auxiliary}
    metrics: dict[float, dict[int, Mapping[str, float]]] = {}
    for run in runs:
        if run.auxiliary == auxiliary:
            metrics.setdefault(run.weight, {})[run.seed] = run.metrics[split]
    directions = runs[0].directions
    return transfer_curve(
        {weight: scores_of(by_seed, baseline, directions) for weight, by_seed in metrics.items()},
        scores_of(baseline, baseline, directions),
        target=target,
        auxiliary=auxiliary,
        algorithm=label,
        split=split,
        confidence=confidence,
    )


def shift_of(runs: Sequence[TransferRunResult], curve: TransferCurve) -> ShiftCurve | None:
    """Return CSD(λ) beside a transfer curve of the same runs; None where there are no confidences."""
    discrepancies: dict[float, dict[int, float]] = {}
    for run in runs:
        if run.auxiliary in ("", curve.auxiliary) and curve.split in run.discrepancy:
            discrepancies.setdefault(run.weight if run.auxiliary else 0.0, {})[run.seed] = run.discrepancy[curve.split]
    if 0.0 not in discrepancies or len(discrepancies) < 2:
        return None
    return shift_curve(discrepancies, curve)


def measure_matrix(
    recipes_of: Mapping[str, Recipes],
    *,
    maker: Maker = equal_weights,
    label: str = "equal weights",
    seeds: Iterable[int] = range(3),
    steps: int | None = None,
    split: str = "test",
    workers: int = 1,
) -> TransferMatrix:
    """Return the transfer gains at λ = 1 of every auxiliary on every target.

    ForkMerge chooses its coefficients on validation data, so that only on test data its gains compare with others'.

    Args:
        recipes_of: `{target: recipes}`.
        maker: `equal_weights`, or `forkmerge` for the second of the paper's two matrices.
        label: Its name.
        seeds: Paired seeds.
        steps: Training steps.
        split: "test", which is read once after each fit, or "validation".
        workers: Processes.

    References:
        ForkMerge, Fig. 5.
    """
    numbers = tuple(seeds)
    gains: dict[tuple[str, str], Gain] = {}
    for target, recipes in recipes_of.items():
        curves = measure_transfer(
            recipes,
            weights=(1.0,),
            seeds=numbers,
            maker=maker,
            label=label,
            steps=steps,
            split=split,
            workers=workers,
        )
        gains.update({(auxiliary, target): curve.points[0] for auxiliary, curve in curves.items()})
    rows = list(dict.fromkeys([*(auxiliary for auxiliary, _ in gains), *recipes_of]))
    return transfer_matrix(gains, algorithm=label, auxiliaries=rows, targets=list(recipes_of), split=split)
