"""The search of one merge: which coefficients its branches get."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forkmerge.engine.merging.arithmetic import Coefficients, vertices
from forkmerge.engine.merging.candidates import Candidates
from forkmerge.engine.merging.group_search import search_groups
from forkmerge.engine.merging.layer_groups import LayerGroups, collapsed, expanded
from forkmerge.engine.merging.race import Entrant, ScoredEntrant
from forkmerge.engine.merging.rules import CostTable, Rule, is_within
from forkmerge.engine.merging.searches import Search, best_of
from forkmerge.errors import ProblemError

_ARGMAX = Rule()


class MergeProblem(ABC):
    """The branches of one merge, and how combinations of them are scored.

    A combination has one coefficient per branch, faulty ones included, and is scored exactly as it would be installed;
    where there are layer groups, it may have one per branch and group.

    Args:
        names: Branch names; those of earlier merges, which may be taken like a branch, come last.
        faults: Why a branch is known to be unusable, by name.
        on_sample: Whether the search sees a sub-sample of the validation data; its winner is then confirmed on all.
        earlier: How many of the names are those of earlier merges.
        groups: The layer groups that may have coefficients of their own.
    """

    def __init__(
        self,
        names: Sequence[str],
        faults: Mapping[str, str] | None = None,
        *,
        on_sample: bool = False,
        earlier: int = 0,
        groups: LayerGroups | None = None,
    ) -> None:
        self.names, self.faults, self.on_sample = tuple(names), dict(faults or {}), on_sample
        self.branches, self.groups = len(names) - earlier, groups

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


Groups = dict[str, dict[str, float]]
"""Coefficients by layer group and branch."""


@dataclass
class Merge:
    """What a search chose.

    Args:
        coefficients: Λ by branch name; empty when no branch could be used. Where layer groups have their own, their
            mean, each group weighted by its parameters.
        score: Validation score of the merged state, −∞ when there is none.
        branch_scores: Validation score of every branch.
        candidates: Every combination tried, with its score, in order; on the sub-sample where one is used. Means, as
            `coefficients` are.
        unfinished: Positions in `candidates` of those that lost a race, whose scores are upper bounds.
        faults: Why a branch was given coefficient 0 without a trial, by branch name.
        groups: Λ by layer group and branch name; None where all groups have the same.
        candidate_groups: Those of the candidates.
    """

    coefficients: dict[str, float]
    score: float
    branch_scores: dict[str, float]
    candidates: list[tuple[dict[str, float], float]] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    groups: Groups | None = None
    candidate_groups: list[Groups | None] = field(default_factory=list)

    @property
    def vector(self) -> Coefficients:
        """The coefficients in the order of the branches, by group if any; empty when no branch could be used."""
        return self.vector_of(list(self.coefficients))

    def vector_of(self, names: Sequence[str]) -> Coefficients:
        """The coefficients of some branches, by group where groups have their own; 0 for one that has none."""
        parts = [self.coefficients] if self.groups is None else list(self.groups.values())
        return tuple(part.get(name, 0.0) for part in parts for name in names)


def find_merge(problem: MergeProblem, search: Search, rule: Rule = _ARGMAX) -> Merge:
    """Search the coefficients of a merge.

    Branches with a fault (a loss, parameter or score that is not finite) get coefficient 0. A search on a sub-sample
    has its winner confirmed on all validation data: the best single branch is taken instead if it is better there, so
    the merge is never worse on validation than any branch.

    Earlier merges are taken like branches, so that the merge is never worse than they are either, but only if there is
    a branch that can be used. Layer groups get coefficients of their own from where the search has ended.

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
    if any(i < problem.branches for i in usable):
        _choose(problem, search, rule, merge, usable, [scores[i] for i in usable])
    return merge


def _choose(
    problem: MergeProblem, search: Search, rule: Rule, merge: Merge, usable: list[int], scores: list[float]
) -> None:
    """Search among combinations of the usable branches, and write what the rule chooses into the merge."""
    names, count, singles = problem.names, len(usable), vertices(len(usable))
    groups = problem.groups if search.guarded and count > 1 else None
    sample_scores = [problem.sample_score_of_branch(i) for i in usable] if problem.on_sample else scores

    def widen(points: Sequence[Coefficients]) -> list[Coefficients]:
        return [_widen(point, usable, len(names)) for point in points]

    candidates = Candidates(
        branch_scores=dict(zip(singles, sample_scores, strict=True)),
        enter=lambda points, guides: problem.enter(widen(points), widen(guides)),
    )
    chosen = _search(search, candidates, usable, len(names))
    if groups is not None:
        chosen = search_groups(candidates, chosen, len(groups.names))
    has_choice = rule.needs_costs and search.guarded and count > 1
    if has_choice:
        uniform = _uniform(problem.branches, usable)
        candidates(uniform)
        finished, copies = candidates.finish(), 1 if groups is None else len(groups.names)
        points, results = [point for point, _ in finished], [score for _, score in finished]
        table, best = problem.cost_table(widen(points)), candidates.position(chosen)
        whole = [expanded(point, count, copies) for point in points]
        chosen = candidates.same(collapsed(rule.choose(whole, results, best, table, uniform * copies), count))
    if chosen in singles:
        merge.score = scores[singles.index(chosen)]
    else:
        merge.score = problem.score(*widen([chosen])) if problem.on_sample else candidates(chosen)
    best = max(range(len(usable)), key=scores.__getitem__)
    if search.guarded and not merge.score >= scores[best]:
        pair = widen([singles[best], chosen])
        if not (has_choice and math.isfinite(merge.score) and _is_close(problem, pair, scores[best] - merge.score)):
            chosen, merge.score = singles[best], scores[best]
    (merge.coefficients, merge.groups), *others = [
        _named(point, problem) for point in widen([chosen, *(point for point, _ in candidates.tried)])
    ]
    merge.candidates = [(means, score) for (means, _), (_, score) in zip(others, candidates.tried, strict=True)]
    merge.candidate_groups = [parts for _, parts in others]
    merge.unfinished = candidates.unfinished


def _widen(point: Coefficients, usable: Sequence[int], branches: int) -> Coefficients:
    """Return coefficients of usable branches as those of all, in every layer group."""
    if len(usable) == branches:
        return point
    parts = [point[first : first + len(usable)] for first in range(0, len(point), len(usable))]
    entries = [dict(zip(usable, part, strict=True)) for part in parts]
    return tuple(entry.get(i, 0.0) for entry in entries for i in range(branches))


def _uniform(branches: int, usable: Sequence[int]) -> Coefficients:
    """Return uniform coefficients of the usable branches; earlier merges are none."""
    count = sum(i < branches for i in usable)
    return tuple(1 / count if i < branches else 0.0 for i in usable)


def _named(point: Coefficients, problem: MergeProblem) -> tuple[dict[str, float], Groups | None]:
    """Return coefficients by name, the mean of groups that have their own, and these."""
    names, groups = problem.names, problem.groups
    if groups is None or len(point) == len(names):
        return dict(zip(names, point, strict=True)), None
    parts = [dict(zip(names, part, strict=True)) for part in groups.parts(point)]
    return dict(zip(names, groups.mean(point), strict=True)), dict(zip(groups.names, parts, strict=True))


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
