"""Pure functions of numbers: relative changes, paired differences with their intervals, wins and losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev

from forkmerge.errors import ProblemError, unknown_name

CONFIDENCE = 0.95
_EQUAL = 1e-12  # differences below are rounding, and count as ties

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Spread:
    """Numbers over seeds.

    Args:
        mean: Their mean.
        std: Their standard deviation (n − 1); None for a single number, or where one is not finite.
        count: How many there are.
    """

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True)
class Paired:
    """Differences between two methods that share seeds, so that what a seed does to both cancels.

    Args:
        mean: The mean difference.
        low: Lower end of the confidence interval of the mean; None where seeds show no spread: a single one, equal
            differences, or one that is not finite.
        high: Upper end.
        wins: Seeds with a positive difference.
        ties: Seeds without a difference.
        losses: Seeds with a negative difference.
    """

    mean: float
    low: float | None
    high: float | None
    wins: int
    ties: int
    losses: int

    @property
    def count(self) -> int:
        """The number of seeds."""
        return self.wins + self.ties + self.losses


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation.

    Example:
        >>> spread([1.0, 2.0, 3.0])
        Spread(mean=2.0, std=1.0, count=3)
    """
    if not values:
        raise ProblemError("there is no value to take the mean of.")
    if not all(map(math.isfinite, values)):
        return Spread(sum(values) / len(values), None, len(values))
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def relative_change(metrics: Metrics, reference: Metrics, directions: Mapping[str, int]) -> float:
    """Return the mean over a task's metrics of (−1)^z (M_m − M_b) / |M_b|, as a fraction.

    NaN where a reference is 0 or anything is not finite: a relative change does not exist there.

    Args:
        metrics: M_m, the method's metrics of one task.
        reference: M_b, those of single-task training.
        directions: +1 for metrics where higher is better (z = 0), −1 for the others.
    """
    changes = []
    for name, direction in directions.items():
        for values in (metrics, reference):
            if name not in values:
                raise ProblemError("a relative change lacks a value: " + unknown_name("metric", name, values))
        changes.append(_change(metrics[name], reference[name], direction))
    return math.fsum(changes) / len(changes) if all(map(math.isfinite, changes)) else math.nan


def compare_paired(
    ours: Mapping[int, float], theirs: Mapping[int, float], confidence: float = CONFIDENCE
) -> Paired | None:
    """Return how much better one method is than another over the seeds they share; None if they share none.

    The interval is that of Student's t for paired samples: d̄ ± t_{n−1} s_d / √n. Differences that are all equal have
    none: a few seeds that agree to the last digit, as coarse metrics do, say nothing of how far others would be off.

    Args:
        ours: `{seed: score}`, higher is better.
        theirs: The same of the method compared with.
        confidence: The share of such intervals that would hold the true mean difference.
    """
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not differences:
        return None
    average = spread(differences)
    half = None
    if average.std is not None and average.std > _EQUAL:
        half = t_quantile((1 + confidence) / 2, average.count - 1) * average.std / math.sqrt(average.count)
    return Paired(
        mean=average.mean,
        low=None if half is None else average.mean - half,
        high=None if half is None else average.mean + half,
        wins=sum(difference > _EQUAL for difference in differences),
        ties=sum(abs(difference) <= _EQUAL for difference in differences),
        losses=sum(difference < -_EQUAL for difference in differences),
    )


@lru_cache(maxsize=256)
def t_quantile(probability: float, freedom: int) -> float:
    """Return the point below which Student's t with `freedom` degrees of freedom lies with the given probability.

    Example:
        >>> round(t_quantile(0.975, 4), 4)
        2.7764
    """
    # Bisection of a closed form, which needs no more than `math`: scipy, which has it, is no dependency of ours.
    if freedom < 1 or not 0 < probability < 1:
        raise ProblemError(f"t_quantile takes 0 < probability < 1 and freedom ≥ 1, got {probability}, {freedom}.")
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(80):  # halves the interval to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_below(t: float, freedom: int) -> float:
    """The distribution function for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    return 0.5 + ((angle + inside) / math.pi if odd else inside / 2)


def _change(value: float, reference: float, direction: int) -> float:
    return direction * (value - reference) / abs(reference) if reference else math.nan
