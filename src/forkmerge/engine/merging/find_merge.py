"""The search of one merge: which coefficients its branches get."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forkmerge.engine.merging.arithmetic import Coefficients, vertices
from forkmerge.engine.merging.candidates import Candidates
from forkmerge.engine.merging.race import Entrant, ScoredEntrant
from forkmerge.engine.merging.rules import CostTable, Rule, is_within
from forkmerge.engine.merging.searches import Search, best_of
from forkmerge.errors import ProblemError

_ARGMAX = Rule()


class MergeProblem(ABC):
    """The branches of one merge, and how combinations of them are scored.

    A combination has one coefficient per branch, faulty ones included, and is scored exactly as it would be installed.

    Args:
        names: Branch names.
        faults: Why a branch is known to be unusable, by name.
        on_sample: Whether the search sees a sub-sample of the validation data; its winner is then confirmed on all.
    """

    def __init__(
        self, names: Sequence[str], faults: Mapping[str, str] | None = None, *, on_sample: bool = False
    ) -> None:
        self.names, self.faults, self.on_sample = tuple(names), dict(faults or {}), on_sample

    @abstractmethod
    def score_branch(self, index: int) -> float:
        """Return the score of a single branch on all validation data."""

    @abstractmethod
    def score(self, coefficients: Coefficients) -> float:
        """Return the score of a combination on all validation data."""

    def sample_score_of_branch(self, index: int) -> float:
        """Return the score of a single branch as the search sees it; asked only where `on_sample`."""
        return self.score_branch(index)

    def enter(self, candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> Sequence[Entrant]:
        """Return the entrants of a race between combinations, as the search sees them.

        Called once all branches are scored, with all combinations that do not depend on one another, so this is where
        they may be spread over workers. `guides` are combinations whose scores are known and tell where these may err.
        """
        return [ScoredEntrant(self.score(coefficients)) for coefficients in candidates]

    def cost_table(self, points: Sequence[Coefficients], *, on_all: bool = False) -> CostTable:
        """Return what every example costs combinations that were scored; asked only by rules that need costs.

        Args:
            points: The combinations.
            on_all: Whether all validation examples are asked about, and not those that the search sees.
        """
        raise ProblemError(
            "a rule other than argmax compares candidates example by example, so it needs metrics that add up over "
            "examples, such as fm.accuracy or fm.nll."
        )


@dataclass
class Merge:
    """What a search chose.

    Args:
        coefficients: Λ by branch name; empty when no branch could be used.
        score: Validation score of the merged state, −∞ when there is none.
        branch_scores: Validation score of every branch.
        candidates: Every combination tried, with its score, in order; on the sub-sample where one is used.
        unfinished: Positions in `candidates` of those that lost a race, whose scores are upper bounds.
        faults: Why a branch was given coefficient 0 without a trial, by branch name.
    """

    coefficients: dict[str, float]
    score: float
    branch_scores: dict[str, float]
    candidates: list[tuple[dict[str, float], float]] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def vector(self) -> Coefficients:
        """The coefficients in the order of the branches; empty when no branch could be used."""
        return tuple(self.coefficients.values())


def find_merge(problem: MergeProblem, search: Search, rule: Rule = _ARGMAX) -> Merge:
    """Search the coefficients of a merge.

    Branches with a fault (a loss, parameter or score that is not finite) get coefficient 0. A search on a sub-sample
    has its winner confirmed on all validation data: the best single branch is taken instead if it is better there, so
    the merge is never worse on validation than any branch.

    Another rule than argmax chooses among all candidates that the search has evaluated, and uniform coefficients of the
    usable branches. What it chooses may be worse on validation than the best branch, but by no more than the standard
    error of their paired difference: the best branch is taken otherwise.
    """
    names, faults = problem.names, dict(problem.faults)
    scores = [-math.inf if name in faults else problem.score_branch(i) for i, name in enumerate(names)]
    for name, score in zip(names, scores, strict=True):
        if not math.isfinite(score):
            faults.setdefault(name, "its validation score is not finite")
    usable = [i for i, name in enumerate(names) if name not in faults]
    merge = Merge({}, -math.inf, dict(zip(names, scores, strict=True)), faults=faults)
    if usable:
        _choose(problem, search, rule, merge, usable, [scores[i] for i in usable])
    return merge


def _choose(
    problem: MergeProblem, search: Search, rule: Rule, merge: Merge, usable: list[int], scores: list[float]
) -> None:
    """Search among combinations of the usable branches, and write what the rule chooses into the merge."""
    names, singles = problem.names, vertices(len(usable))
    sample_scores = [problem.sample_score_of_branch(i) for i in usable] if problem.on_sample else scores

    def widen(points: Sequence[Coefficients]) -> list[Coefficients]:
        if len(usable) == len(names):
            return list(points)
        entries = (dict(zip(usable, point, strict=True)) for point in points)
        return [tuple(entry.get(i, 0.0) for i in range(len(names))) for entry in entries]

    candidates = Candidates(
        branch_scores=dict(zip(singles, sample_scores, strict=True)),
        enter=lambda points, guides: problem.enter(widen(points), widen(guides)),
    )
    chosen = _search(search, candidates, usable, len(names))
    has_choice = rule.needs_costs and search.guarded and len(usable) > 1
    if has_choice:
        candidates((1 / len(usable),) * len(usable))
        finished = candidates.finish()
        points, results = [point for point, _ in finished], [score for _, score in finished]
        table = problem.cost_table(widen(points))
        chosen = candidates.same(rule.choose(points, results, candidates.position(chosen), table))
    if chosen in singles:
        merge.score = scores[singles.index(chosen)]
    else:
        merge.score = problem.score(*widen([chosen])) if problem.on_sample else candidates(chosen)
    best = max(range(len(usable)), key=scores.__getitem__)
    if search.guarded and not merge.score >= scores[best]:
        pair = widen([singles[best], chosen])
        if not (has_choice and math.isfinite(merge.score) and _is_close(problem, pair, scores[best] - merge.score)):
            chosen, merge.score = singles[best], scores[best]
    (vector,) = widen([chosen])
    merge.coefficients = dict(zip(names, vector, strict=True))
    tried = candidates.tried
    points = widen([point for point, _ in tried])
    merge.candidates = [
        (dict(zip(names, point, strict=True)), score) for point, (_, score) in zip(points, tried, strict=True)
    ]
    merge.unfinished = candidates.unfinished


def _is_close(problem: MergeProblem, pair: Sequence[Coefficients], lag: float) -> bool:
    """Whether the second of two combinations lags behind the first by a standard error at most, on all examples."""
    return is_within(lag, problem.cost_table(pair, on_all=True).standard_error(0, 1))


def _search(search: Search, candidates: Candidates, usable: list[int], branches: int) -> Coefficients:
    if search.guarded:
        return best_of(search, candidates, len(usable))
    fixed = search.search(candidates, branches)  # fixed coefficients name all branches; the rest share a bad one's part
    total = math.fsum(fixed[i] for i in usable)
    if total == 0:
        return tuple(float(i == 0) for i in range(len(usable)))
    return tuple(fixed[i] if total == 1 else fixed[i] / total for i in usable)
