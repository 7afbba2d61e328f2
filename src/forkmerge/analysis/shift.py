"""Distribution shift: confidence score discrepancy against λ, and the training distribution that λ interpolates."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from forkmerge.analysis.results import ShiftCurve, ShiftPoint, TransferCurve
from forkmerge.errors import ProblemError
from forkmerge.experiments.paired_statistics import spread
from forkmerge.problem.randomness import derive


def shift_curve(discrepancies: Mapping[float, Mapping[int, float]], curve: TransferCurve) -> ShiftCurve:
    """Return CSD(λ) with TG(λ) beside it.

    Args:
        discrepancies: `{λ: {seed: CSD}}`, λ = 0 for single-task training.
        curve: The transfer gains of the same runs.

    References:
        ForkMerge, Section 3.2 and Fig. 3b.
    """
    gains = {point.weight: point.mean for point in curve.points} | {0.0: 0.0}
    points = []
    for weight in sorted(discrepancies):
        if weight not in gains:
            raise ProblemError(f"there is a discrepancy at λ = {weight:g}, but no transfer gain.")
        values = tuple(discrepancies[weight].values())
        over_seeds = spread(values)
        points.append(ShiftPoint(weight, values, over_seeds.mean, over_seeds.std, gains[weight]))
    return ShiftCurve(curve.target, curve.auxiliary, curve.split, curve.seeds, tuple(points))


def interpolate(target: int, auxiliary: int, weight: float, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw from T_inter = (1 − Z) T_tgt + Z T_aux, Z ~ Bernoulli(λ / (1 + λ)).

    Returns which points are the auxiliary's, [count] of bool, and the index of every point in its own data set.
    Points are drawn without replacement as long as there are any.

    Args:
        target: Examples of the target.
        auxiliary: Examples of the auxiliary.
        weight: λ ≥ 0.
        count: How many points.
        seed: Of the draw.

    References:
        ForkMerge, Section 3.2.
    """
    if not weight >= 0:
        raise ProblemError(f"λ must be at least 0, got {weight!r}.")
    generator = torch.Generator().manual_seed(derive(seed, "interpolate", weight))
    is_auxiliary = torch.rand(count, generator=generator, dtype=torch.float64) < weight / (1 + weight)
    indices = torch.empty(count, dtype=torch.long)
    for size, mask in ((target, ~is_auxiliary), (auxiliary, is_auxiliary)):
        wanted = int(mask.sum())
        rounds = [torch.randperm(size, generator=generator) for _ in range(-(-wanted // size))]
        if wanted:
            indices[mask] = torch.cat(rounds)[:wanted]
    return is_auxiliary, indices
