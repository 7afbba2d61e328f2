"""The merge of one round: which coefficients, and the state they give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from forkmerge.engine.merging.candidates import Candidates, ScoreMany
from forkmerge.engine.merging.coefficients import Coefficients, vertices
from forkmerge.engine.merging.race_over_examples import ExampleRace
from forkmerge.engine.merging.searches import Search, best_of

S = TypeVar("S")


@dataclass
class Merge:
    """What a search found.

    Args:
        coefficients: Λ by branch name; empty when no branch could be used.
        score: Validation score of the merged state, −∞ when there is none.
        branch_scores: Validation score of every branch.
        candidates: Every combination tried, with its score, in order; on the sub-sample where one is used.
        unfinished: Positions in `candidates` of those that lost a race, whose scores are upper bounds.
        faults: Why a branch was given coefficient 0 without a trial, by branch name.
        certainty: How often the winner of the search beats the target-only branch on examples drawn anew, if asked.
    """

    coefficients: dict[str, float]
    score: float
    branch_scores: dict[str, float]
    candidates: list[tuple[dict[str, float], float]] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    certainty: float | None = None


def find_merge(
    names: Sequence[str],
    states: Sequence[S],
    *,
    search: Search,
    score: Callable[[S], float],
    blend: Callable[[Coefficients], S],
    search_score: Callable[[S], float] | None = None,
    evaluate_many: ScoreMany | None = None,
    course: Callable[[], ExampleRace | None] | None = None,
    faults: Mapping[str, str] | None = None,
) -> Merge:
    """Search the coefficients of a merge.

    Branches with a fault (a loss, parameter or score that is not finite) get coefficient 0. With `search_score`
    the search runs on a sub-sample and its winner is confirmed by `score`: the best single branch is taken
    instead if it is better there, so the merge is never worse on validation than any branch.

    Args:
        names: Branch names.
        states: Their states, in whatever form `score` takes them.
        search: How to look for coefficients.
        score: Scores a state on all validation data.
        blend: Builds the state of given coefficients, exactly as it would be installed.
        search_score: Scores a state on the sub-sample; `score` where None.
        evaluate_many: Returns the scores of several candidates at once, on the sub-sample where there is one. Each
            candidate has one coefficient per branch, faulty ones included. One blend and score after the other
            where None. The searches pass whole lists, so this is where candidates can be spread over workers.
        course: Called once all branches are scored; gives the course that candidates are raced on, or None where
            scores do not add up over examples.
        faults: Branches already known to be unusable, and why.
    """
    found = dict(faults or {})
    branch_scores = {
        name: -math.inf if name in found else score(state) for name, state in zip(names, states, strict=True)
    }
    for name, value in branch_scores.items():
        if not math.isfinite(value):
            found.setdefault(name, "its validation score is not finite")
    good = [i for i, name in enumerate(names) if name not in found]
    result = Merge({}, -math.inf, branch_scores, faults=found)
    if not good:
        return result

    def expand(coefficients: Coefficients) -> Coefficients:
        full = dict(zip(good, coefficients, strict=True))
        return tuple(full.get(i, 0.0) for i in range(len(names)))

    rank = search_score or score
    singles, scores = vertices(len(good)), [branch_scores[names[i]] for i in good]
    ranked = scores if search_score is None else [search_score(states[i]) for i in good]
    many = evaluate_many or (lambda candidates: [rank(blend(c)) for c in candidates])
    track = course() if course is not None else None
    tried = Candidates(
        lambda c: many([expand(c)])[0],
        known=dict(zip(singles, ranked, strict=True)),
        evaluate_many=lambda candidates: many([expand(c) for c in candidates]),
        enter=None if track is None else lambda c, guides: track.enter(expand(c), [expand(g) for g in guides]),
    )
    chosen = _search(search, tried, good, len(names))
    if chosen in singles:
        result.score = scores[singles.index(chosen)]
    else:
        result.score = tried(chosen) if search_score is None else score(blend(expand(chosen)))
    best = max(range(len(good)), key=scores.__getitem__)
    if search.guarded and not result.score >= scores[best]:
        chosen, result.score = singles[best], scores[best]
    result.coefficients = dict(zip(names, expand(chosen), strict=True))
    result.candidates = [(dict(zip(names, expand(c), strict=True)), value) for c, value in tried.tried]
    result.unfinished = tried.unfinished
    return result


def _search(search: Search, tried: Candidates, good: list[int], branches: int) -> Coefficients:
    if search.guarded:
        return best_of(search, tried, len(good))
    fixed = search.search(tried, branches)  # fixed coefficients name all branches; the rest share a bad one's part
    total = math.fsum(fixed[i] for i in good)
    if total == 0:
        return tuple(float(i == 0) for i in range(len(good)))
    return tuple(fixed[i] if total == 1 else fixed[i] / total for i in good)
