"""Which candidate of a search is installed: the best, or one that so few examples cannot tell from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forkmerge.engine.merging.arithmetic import Coefficients
from forkmerge.errors import ProblemError, unknown_name

RuleName = Literal["argmax", "one_standard_error", "bagged"]
ARGMAX: RuleName = "argmax"
ONE_STANDARD_ERROR: RuleName = "one_standard_error"
BAGGED: RuleName = "bagged"
RULES = (ARGMAX, ONE_STANDARD_ERROR, BAGGED)
"""The rules that an option can name."""

_RESAMPLES = 1000
_AT_ONCE = 50  # resamples whose sums are one matrix product
# A single example that tells two candidates apart is exactly one standard error: rounding must not decide about it.
_ROUNDING = 1e-9
_DECIMALS = 12  # of distances: (0.6, 0.4) and (0.4, 0.6) are as far from uniform


@dataclass(frozen=True)
class CostTable:
    """What every example costs candidates, from which their scores are made.

    A score is a constant plus Σ_m slopes[m] · Σ_i costs[i, m] / Σ_i counts[i, m].

    Args:
        costs: [candidates, examples, metrics], in float64.
        counts: [examples, metrics].
        slopes: [metrics].
    """

    costs: Tensor
    counts: Tensor
    slopes: Tensor

    def standard_error(self, one: int, other: int) -> float:
        """Return the standard error of the difference between two candidates' scores, paired over examples.

        Where examples count differently, it is that of a ratio of means, linearised.
        """
        totals, size = self.counts.sum(0), len(self.counts)
        difference = self.costs[one] - self.costs[other]  # [n, metrics]
        apart = (difference - difference.sum(0) / totals * self.counts) * (self.slopes / totals)
        return math.sqrt(size / max(size - 1, 1) * apart.sum(1).square().sum().item())


@dataclass(frozen=True)
class Rule:
    """Chooses among the candidates of a search.

    - "argmax": the best, of equals the one that the search prefers; as in the paper.
    - "one_standard_error": of all candidates that are not worse than the best by more than the standard error of their
      paired difference over the examples, the one nearest to uniform coefficients of the branches; of equals the better
      one.
    - "bagged": the mean of the candidates that are best in resamples of the examples, drawn with replacement; those
      that tie in a resample share it. It takes no further pass over the network, but one for the mean.

    Args:
        name: Which.
        seed: Of the resamples.
    """

    name: str = ARGMAX
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise ProblemError(unknown_name("rule", self.name, RULES))

    @property
    def needs_costs(self) -> bool:
        """Whether the costs of every example to every candidate are needed."""
        return self.name != ARGMAX

    def choose(
        self,
        candidates: Sequence[Coefficients],
        scores: Sequence[float],
        best: int,
        table: CostTable,
        uniform: Coefficients | None = None,
    ) -> Coefficients:
        """Return the coefficients chosen, which may be none of the candidates.

        Args:
            candidates: All candidates, uniform coefficients among them.
            scores: Their scores.
            best: Position of the one that the search has chosen.
            table: Their costs.
            uniform: Uniform coefficients, where they are not those of as many branches as there are numbers.
        """
        centre = uniform or (1 / len(candidates[0]),) * len(candidates[0])
        finite = [i for i, score in enumerate(scores) if math.isfinite(score)]
        if self.name == BAGGED:
            votes = _votes(table, finite, self.seed)
            return _mean(candidates, votes) if any(votes.values()) else candidates[best]
        if self.name == ONE_STANDARD_ERROR:
            close = [i for i in finite if is_within(scores[best] - scores[i], table.standard_error(best, i))]
            return candidates[min(close, key=lambda i: (_distance(candidates[i], centre), -scores[i], i))]
        return candidates[best]


def is_within(lag: float, error: float) -> bool:
    """Whether a score lags behind by no more than a standard error."""
    return lag <= error * (1 + _ROUNDING)


def check_rule(rule: str, *, is_guarded: bool) -> None:
    """Refuse a rule that has nothing to choose from."""
    if rule != ARGMAX and not is_guarded:
        raise ProblemError(
            f"rule={rule!r} chooses among the candidates of a search, and fixed coefficients are not searched: leave "
            "the rule out, or take another search."
        )


def _distance(coefficients: Coefficients, centre: Coefficients) -> float:
    pairs = zip(coefficients, centre, strict=True)
    return round(math.fsum((value - share) ** 2 for value, share in pairs), _DECIMALS)


def _votes(table: CostTable, usable: Sequence[int], seed: int) -> dict[int, float]:
    """Return how many resamples every usable candidate wins, parts of those that it ties in included."""
    # Candidates of equal costs are summed once: a matrix product may round equal columns differently.
    alike: dict[bytes, list[int]] = {}
    for index in usable:
        alike.setdefault(table.costs[index].numpy().tobytes(), []).append(index)
    groups = list(alike.values())
    costs = table.costs[[group[0] for group in groups]]  # [groups, n, metrics]
    sizes = torch.tensor([float(len(group)) for group in groups], dtype=torch.float64)
    columns = costs.transpose(0, 1).flatten(1)  # [n, groups · metrics]
    draw, size = torch.Generator().manual_seed(seed), len(table.counts)
    won = torch.zeros_like(sizes)
    for _ in range(0, _RESAMPLES, _AT_ONCE):
        drawn = [torch.randint(size, (size,), generator=draw) for _ in range(_AT_ONCE)]
        times = torch.stack([torch.bincount(each, minlength=size) for each in drawn]).double()
        totals = times @ table.counts  # [resamples, metrics]
        counts_any = (totals > 0).all(1)  # a resample of nothing but examples without labels tells nothing
        means = (times @ columns).unflatten(1, (len(groups), -1)) / totals.unsqueeze(1)
        scores = (means * table.slopes).sum(2)[counts_any]
        shares = (scores == scores.amax(1, keepdim=True)).double() * sizes
        won += (shares / shares.sum(1, keepdim=True)).sum(0)
    return {i: won[at].item() / len(group) for at, group in enumerate(groups) for i in group}


def _mean(candidates: Sequence[Coefficients], votes: dict[int, float]) -> Coefficients:
    winners = {i: vote for i, vote in votes.items() if vote > 0}
    if len(winners) == 1:
        return candidates[next(iter(winners))]
    total = math.fsum(winners.values())
    columns = zip(*([value * vote for value in candidates[i]] for i, vote in winners.items()), strict=True)
    return tuple(math.fsum(column) / total for column in columns)
