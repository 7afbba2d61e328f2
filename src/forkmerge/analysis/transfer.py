"""Transfer gain from scores: TG(λ, A), its verdict, and the matrix of auxiliaries and targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from forkmerge.analysis.results import Gain, TransferCurve, TransferMatrix, Verdict
from forkmerge.errors import ProblemError
from forkmerge.experiments.paired_statistics import CONFIDENCE, compare_paired
from forkmerge.problem.metrics import Criterion

WEIGHTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""The λ > 0 of the paper's analysis."""

Scores = Mapping[int, float]
"""One score by seed."""


def transfer_gain(scores: Scores, baseline: Scores, weight: float, confidence: float = CONFIDENCE) -> Gain:
    """Return TG(λ) = P(θ_A(λ)) − P(θ_STL) over the seeds that both have.

    A score that is not finite where the target alone has one, as after a run that diverged, makes the mean −∞.

    Args:
        scores: With the auxiliary, by seed.
        baseline: Of single-task training, by seed.
        weight: λ.
        confidence: Of the interval, Student's t for paired differences.

    References:
        ForkMerge, Definition 3.1.
    """
    shared = [seed for seed in scores if seed in baseline]
    paired = compare_paired(scores, baseline, confidence)
    if paired is None:
        raise ProblemError(f"no seed has a score with and without the auxiliary at λ = {weight:g}.")
    gains = tuple(scores[seed] - baseline[seed] for seed in shared)
    diverged = any(math.isfinite(baseline[seed]) and not math.isfinite(scores[seed]) for seed in shared)
    return Gain(float(weight), gains, -math.inf if diverged else paired.mean, paired.low, paired.high)


def transfer_curve(
    scores: Mapping[float, Scores],
    baseline: Scores,
    *,
    target: str,
    auxiliary: str,
    algorithm: str = "equal weights",
    split: str = "validation",
    confidence: float = CONFIDENCE,
) -> TransferCurve:
    """Return TG(λ) over a grid of λ > 0, with the verdict.

    Args:
        scores: `{λ: {seed: score}}`.
        baseline: Scores of single-task training, by seed.
        target: The target.
        auxiliary: The auxiliary.
        algorithm: A, as tables call it.
        split: What scores were measured on.
        confidence: Of the intervals.
    """
    if not scores or any(not weight > 0 for weight in scores):
        raise ProblemError(f"a transfer curve needs weights λ > 0, got {sorted(scores)}.")
    points = tuple(transfer_gain(scores[weight], baseline, weight, confidence) for weight in sorted(scores))
    seeds = tuple(baseline)
    return TransferCurve(
        target=target,
        auxiliary=auxiliary,
        algorithm=algorithm,
        seeds=seeds,
        split=split,
        baseline=tuple(baseline[seed] for seed in seeds),
        points=points,
        verdict=judge(points, confidence),
        confidence=confidence,
    )


def judge(points: Sequence[Gain], confidence: float = CONFIDENCE) -> Verdict:
    """Return which kind of transfer the gains show.

    - strong negative: the whole interval is below 0 at *every* λ (max over λ > 0 of TG < 0), and several were tried;
    - weak negative: it is shown at *some* λ, but not at every one;
    - positive: at no λ, and a gain is shown at some;
    - otherwise there is not enough evidence.

    An auxiliary that does nothing gets one of the first three with probability 1 − c at most, whatever λ were tried:
    what is shown at some λ is corrected for all of them (`shown_effects`), and "at every λ" is the last line of Simes'
    test, whose first is Holm's first. That test needs positive dependence, as gains over one baseline have.

    References:
        ForkMerge, Definitions 3.2 and 3.3. Simes, Biometrika 73, 1986.
    """
    if len(points) > 1 and all(point.high is not None and point.high < 0 for point in points):
        return "strong negative"
    effects = shown_effects(points, confidence).values()
    if -1 in effects:
        return "weak negative"
    return "positive" if 1 in effects else "not enough evidence"


def shown_effects(points: Sequence[Gain], confidence: float = CONFIDENCE) -> dict[float, int]:
    """Return the sign of the gain at every λ: ±1 where it is shown, 0 elsewhere; all signs hold together.

    Holm's correction: while n of the λ are not decided yet, an interval of confidence 1 − (1 − c)/n decides. λ = 1, the
    weight people take without thinking, is one of them.

    References:
        Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    effects = {point.weight: 0 for point in points}
    undecided = list(points)
    while undecided:
        level = 1 - (1 - confidence) / len(undecided)
        signs = {point.weight: _sign(point, level) for point in undecided}
        effects.update(signs)
        left = [point for point in undecided if not signs[point.weight]]
        if len(left) == len(undecided):
            break
        undecided = left
    return effects


def _sign(gain: Gain, confidence: float) -> int:
    """Return the side of 0 that the interval of a gain lies on; 0 where it holds 0, or there is none."""
    values = dict(enumerate(gain.gains))
    paired = compare_paired(values, dict.fromkeys(values, 0.0), confidence)
    if paired is None or paired.low is None or paired.high is None:
        return 0
    return (paired.low > 0) - (paired.high < 0)


def scores_of(
    metrics: Mapping[int, Mapping[str, float]],
    baseline: Mapping[int, Mapping[str, float]],
    directions: Mapping[str, int],
) -> dict[int, float]:
    """Return scores by seed from metrics by seed; higher is better.

    One metric is its own score; several are the mean signed relative change against single-task training's means, as
    in a run's own score.

    Args:
        metrics: `{seed: {metric: value}}`.
        baseline: The same of single-task training.
        directions: +1 where higher is better, −1 elsewhere.
    """
    criterion = Criterion(directions)
    if criterion.needs_reference:
        criterion = criterion.with_reference(
            {name: fmean(values[name] for values in baseline.values()) for name in directions}
        )
    return {seed: criterion.score(values) for seed, values in metrics.items()}


def transfer_matrix(
    gains: Mapping[tuple[str, str], Gain],
    *,
    algorithm: str,
    auxiliaries: Sequence[str],
    targets: Sequence[str],
    split: str = "validation",
) -> TransferMatrix:
    """Return the matrix of gains: auxiliaries are rows, targets columns.

    Args:
        gains: `{(auxiliary, target): gain}`.
        algorithm: How tasks were trained together.
        auxiliaries: Names of the rows.
        targets: Names of the columns.
        split: What scores were measured on.
    """
    cells = tuple(tuple(gains.get((row, column)) for column in targets) for row in auxiliaries)
    return TransferMatrix(algorithm, tuple(auxiliaries), tuple(targets), cells, split)
