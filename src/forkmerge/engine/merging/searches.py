"""How the coefficients of a merge are chosen: `(score, number of branches) -> coefficients`.

A search sees nothing but a score function. The first branch is the target alone; ties prefer it. The searches here ask
`Candidates.best_among` which of several candidates is best, which is cheaper than all their scores; a search that calls
`score(coefficients)` works as well.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from forkmerge.engine.merging.arithmetic import Coefficients, check_coefficients, vertices
from forkmerge.engine.merging.candidates import Candidates, Score
from forkmerge.errors import ForkMergeError, ProblemError, is_count, unknown_name


def _remembering(score: Score) -> Candidates:
    return score if isinstance(score, Candidates) else Candidates(score)


class Search(ABC):
    """Chooses the coefficients Λ of a merge.

    A new search implements `search` and `evaluations`, and `check` if it cannot serve any number of branches.

    Attributes:
        beyond_one: True says that coefficients may sum to more than 1.
        guarded: True promises that the merge is never worse than the best single branch; `best_of`
            keeps that promise whatever `search` answers.
    """

    guarded: ClassVar[bool] = True
    beyond_one: ClassVar[bool] = False

    @abstractmethod
    def search(self, score: Score, branches: int) -> Coefficients:
        """Return the coefficients chosen by looking at `score`; one branch needs no look."""

    @abstractmethod
    def evaluations(self, branches: int) -> int:
        """Return the most distinct candidates, single branches included, that `search` may score."""

    def check(self, branches: int) -> None:
        """Raise `ProblemError` if this search cannot serve so many branches; called before training."""
        if branches < 1:
            raise ProblemError(f"a merge needs at least one branch, got {branches!r}.")


@dataclass(frozen=True)
class Grid(Search):
    """Every point of the simplex whose coefficients are multiples of 1/resolution.

    With two branches and the default resolution: λ, the coefficient of the second branch, in
    {0, .2, .4, .6, .8, 1}. Of equal scores the smaller coefficients of later branches win, the last
    branch compared first. Scores C(resolution + B − 1, B − 1) candidates for B branches.

    Args:
        resolution: How many steps lead from one branch to another.
    """

    resolution: int = 5

    def __post_init__(self) -> None:
        _check_count("resolution", self.resolution)

    def search(self, score: Score, branches: int) -> Coefficients:
        """Return the best point of the grid."""
        self.check(branches)
        if branches == 1:
            return (1.0,)
        score = _remembering(score)
        points = (tuple(c / self.resolution for c in counts) for counts in _parts(self.resolution, branches))
        return score.best_among(points)

    def evaluations(self, branches: int) -> int:
        """Return the number of points of the grid."""
        self.check(branches)
        return 0 if branches == 1 else math.comb(self.resolution + branches - 1, branches - 1)


@dataclass(frozen=True)
class Binary(Search):
    """Halving of λ, the second of two coefficients.

    Scores both ends of [0, 1], then repeatedly keeps the half with the better end (of equals the lower) and
    scores its new end. Returns the best of the `iterations + 2` points scored, of equals the smaller λ.

    Args:
        iterations: How often the interval is halved.
    """

    iterations: int = 5

    def __post_init__(self) -> None:
        _check_count("iterations", self.iterations)

    def check(self, branches: int) -> None:
        """Raise `ProblemError` for more than two branches."""
        super().check(branches)
        if branches > 2:
            raise ProblemError(f"the binary search merges two branches, got {branches}: use Greedy().")

    def search(self, score: Score, branches: int) -> Coefficients:
        """Return the best point met while halving."""
        self.check(branches)
        if branches == 1:
            return (1.0,)
        score = _remembering(score)
        low, high = 0.0, 1.0
        met = [low, high]
        for _ in range(self.iterations):
            middle = (low + high) / 2
            met.append(middle)
            is_low = score.best_among([_pair(low), _pair(high)]) == _pair(low)
            low, high = (low, middle) if is_low else (middle, high)
        return score.best_among(map(_pair, sorted(met)))

    def evaluations(self, branches: int) -> int:
        """Return the number of points scored."""
        self.check(branches)
        return 0 if branches == 1 else self.iterations + 2


@dataclass(frozen=True)
class Greedy(Search):
    """Branches are added one by one, best first, each with the coefficient that helps most.

    The branches are ranked by their own scores (of equals the lower index first) and Λ̃ = e_1. For each next
    branch, U is the mean of the unnormalised coefficients Λ̃ so far and α·U is tried for every α; the branch
    gets the best of them if it beats what there was, of equals the smaller, otherwise 0. Candidates
    and answer are normalised to sum 1. Scores at most B + (B − 1)·n candidates, n the number of non-zero α.

    Args:
        alphas: The grid on [0, U] in units of U.

    References:
        ForkMerge, Algorithm 3. The authors' scripts also evaluate α = 0, which is what there was.
    """

    alphas: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

    def __post_init__(self) -> None:
        alphas = self.alphas
        try:
            values = () if isinstance(alphas, str) else tuple(sorted({float(alpha) for alpha in alphas}))
        except (TypeError, ValueError):
            values = ()
        if not values or not all(0 <= alpha <= 1 for alpha in values):
            raise ProblemError(f"alphas must be numbers from 0 to 1, such as (0, 0.5, 1), got {alphas!r}.")
        object.__setattr__(self, "alphas", values)

    def search(self, score: Score, branches: int) -> Coefficients:
        """Return the coefficients after the last branch was tried."""
        self.check(branches)
        if branches == 1:
            return (1.0,)
        score = _remembering(score)
        singles = [score(vertex) for vertex in vertices(branches)]
        first, *others = sorted(range(branches), key=lambda b: -singles[b])  # stable: of equals the lower
        weights = [float(b == first) for b in range(branches)]  # Λ̃
        best = vertices(branches)[first]
        if len(self._totals()) > 1:
            best = score.best_among([_times(best, total) for total in self._totals()], guides=[best])
        for ranked_before, branch in enumerate(others, start=1):
            upper = math.fsum(weights) / ranked_before  # U; branches not yet ranked have weight 0
            trials = {best: 0.0}
            for alpha in filter(None, self.alphas):  # 0 is what there is
                weights[branch] = alpha * upper
                for total in self._totals():
                    trials.setdefault(_times(_normalised(weights), total), alpha * upper)
            best = score.best_among(trials, guides=[best, vertices(branches)[branch]])
            weights[branch] = trials[best]
        return best

    def evaluations(self, branches: int) -> int:
        """Return how many candidates are scored at most."""
        self.check(branches)
        tried, totals = sum(alpha != 0 for alpha in self.alphas), len(self._totals())
        return 0 if branches == 1 else branches + totals - 1 + (branches - 1) * tried * totals

    def _totals(self) -> tuple[float, ...]:
        """What coefficients may sum to."""
        return (1.0,)


@dataclass(frozen=True)
class Sums(Greedy):
    """Greedy search among sums of updates: coefficients may sum to more than 1, over the common fork point.

    A merge is θ_0 + Σ_b Λ_b (θ_b − θ_0), θ_0 what the branches were forked from: Λ = (1, 1) takes the updates of two
    branches in full, where `Greedy` has half of each. As `Greedy`, but every candidate, the best branch alone included,
    is also tried with its coefficients multiplied by each of `totals`. Of equals the smaller α, then the smaller total
    wins. Scores at most B + T − 1 + (B − 1)·n·T candidates, T the number of totals. Buffers and optimizer moments are
    merged with coefficients divided by their sum. Keeps one more copy of the parameters while it searches.

    Args:
        alphas: As of `Greedy`.
        totals: What coefficients may sum to; 1 is always among them.
    """

    beyond_one: ClassVar[bool] = True

    totals: tuple[float, ...] = (1.0, 1.5, 2.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        totals = self.totals
        try:
            values = () if isinstance(totals, str) else tuple(sorted({1.0, *(float(total) for total in totals)}))
        except (TypeError, ValueError):
            values = ()
        if not values or not all(1 <= total < math.inf for total in values):
            raise ProblemError(f"totals must be finite numbers of at least 1, such as (1, 1.5, 2), got {totals!r}.")
        object.__setattr__(self, "totals", values)

    def _totals(self) -> tuple[float, ...]:
        return self.totals


@dataclass(frozen=True)
class Fixed(Search):
    """Coefficients given beforehand: uniform merging, or the replay of an earlier run.

    Scores nothing, so the merge may be worse than a single branch.

    Args:
        coefficients: One per branch; `None` gives every branch the same.
    """

    guarded: ClassVar[bool] = False

    coefficients: Coefficients | None = None

    def __post_init__(self) -> None:
        if self.coefficients is not None:
            object.__setattr__(self, "coefficients", check_coefficients(self.coefficients))

    def check(self, branches: int) -> None:
        """Raise `ProblemError` if there is not one coefficient per branch."""
        super().check(branches)
        if self.coefficients is not None:
            check_coefficients(self.coefficients, branches)

    def search(self, score: Score, branches: int) -> Coefficients:
        """Return the given coefficients without looking at `score`."""
        self.check(branches)
        return (1 / branches,) * branches if self.coefficients is None else self.coefficients

    def evaluations(self, branches: int) -> int:
        """Return 0."""
        return 0


SEARCHES: Mapping[str, type[Search]] = {"grid": Grid, "binary": Binary, "greedy": Greedy, "sums": Sums, "fixed": Fixed}
"""The searches a configuration can name."""


def search_from_name(name: str, **options: object) -> Search:
    """Build a search from its name and options.

    Example:
        >>> search_from_name("grid", resolution=10)
        Grid(resolution=10)
    """
    kind = SEARCHES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProblemError(unknown_name("search", name, SEARCHES))
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # all of SEARCHES are dataclasses
    for option in options:
        if option not in names:
            raise ProblemError(unknown_name(f"option of the {name} search", option, names))
    return kind(**options)


def search_from(value: object) -> Search | None:
    """Return a search from a search, its name or `{"name": …, **options}`; None stays None."""
    if value is None or isinstance(value, Search):
        return value
    if isinstance(value, Mapping) and "name" in value:
        return search_from_name(str(value["name"]), **{str(k): v for k, v in value.items() if k != "name"})
    if isinstance(value, str):
        return search_from_name(value)
    raise ProblemError(f"search must be a search, its name or {{'name': …}}, got {value!r}.")


def fitting(search: Search, branches: int) -> Search | None:
    """Return a search if it can serve so many branches; None, which leaves the choice to the algorithm, if not."""
    try:
        search.check(branches)
    except ForkMergeError:
        return None
    return search


def best_of(search: Search, score: Candidates, branches: int) -> Coefficients:
    """Run a search and keep its promise: if guarded, never worse than the best single branch."""
    search.check(branches)
    answer = check_coefficients(search.search(score, branches), branches, any_sum=search.beyond_one)
    if not search.guarded or branches == 1:
        return answer
    return score.best_among([answer, score.best_among(vertices(branches))])


def _check_count(name: str, value: object) -> None:
    if not is_count(value):
        raise ProblemError(f"{name} must be a whole number of at least 1, got {value!r}.")


def _pair(share: float) -> Coefficients:
    return (1 - share, share)


def _normalised(weights: Sequence[float]) -> Coefficients:
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def _times(coefficients: Coefficients, total: float) -> Coefficients:
    return tuple(total * value for value in coefficients)


def _parts(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write `total` as an ordered sum of `count` parts, the last part rising slowest."""
    if count == 1:
        yield (total,)
        return
    for last in range(total + 1):
        for head in _parts(total - last, count - 1):
            yield (*head, last)
