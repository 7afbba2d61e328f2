"""Coefficients of a merge, and the candidates of a search: each evaluated once, and no further than needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from forkmerge.engine.merging.arithmetic import Coefficients, vertices
from forkmerge.engine.merging.race import Entrant, ScoredEntrant, race
from forkmerge.errors import ProblemError

Score = Callable[[Coefficients], float]
"""P̂ of the model merged with the given coefficients; higher is better."""

Enter = Callable[[Sequence[Coefficients], Sequence[Coefficients]], Sequence[Entrant]]
"""Makes the entrants of a race from candidates that do not depend on one another, and from those whose costs are known
and tell where these may err."""

_KEY_DECIMALS = 12  # far finer than any step a search takes, far coarser than the rounding of a division


class Candidates:
    """A score function that remembers every candidate, so that none is evaluated twice.

    Called, it gives a candidate's score. `best_among` gives the best of several, which may need much less: where
    scores add up over examples, candidates are raced. Coefficients equal to 12 decimals are one candidate. NaN counts
    as minus infinity, so it never wins.

    Args:
        evaluate: Merges with the given coefficients and returns the score; None where `enter` does it.
        branch_scores: Scores of single branches, which need no evaluation; first in `tried`.
        enter: Makes the entrants of a race, all that do not depend on one another at once.

    Example:
        >>> from forkmerge.engine.merging.searches import Grid
        >>> score = Candidates(lambda coefficients: -abs(coefficients[1] - 0.4))
        >>> Grid().search(score, 2), len(score.tried)
        ((0.6, 0.4), 6)
    """

    def __init__(
        self,
        evaluate: Score | None = None,
        *,
        branch_scores: Mapping[Coefficients, float] | None = None,
        enter: Enter | None = None,
    ) -> None:
        if enter is None:
            if evaluate is None:
                raise ProblemError("candidates need a score function, or entrants of a race.")
            enter = partial(_evaluated, evaluate)
        self._enter = enter
        self._entrants: dict[Coefficients, tuple[Coefficients, Entrant]] = {}
        # Complete however the others are evaluated, so that the order of examples may depend on them.
        self._settled: set[Coefficients] = set()
        for coefficients, score in (branch_scores or {}).items():
            self._add(coefficients, ScoredEntrant(score))
            self._settled.add(self._key(coefficients))

    def __call__(self, coefficients: Coefficients) -> float:
        """Return the score of a candidate, evaluating what is still missing."""
        (entrant,) = self._entrants_of([coefficients], ())
        while not entrant.is_complete:
            entrant.extend()
        entrant.ask()
        self._settled.add(self._key(coefficients))
        return entrant.bound

    def best_among(self, candidates: Iterable[Coefficients], *, guides: Sequence[Coefficients] = ()) -> Coefficients:
        """Return the candidate with the highest score; of equals the first.

        Args:
            candidates: The candidates, preferred ones first.
            guides: Single branches, or answers of earlier calls, that err where these candidates are likely to; the
                single branches they are made of where empty.
        """
        points = [tuple(candidate) for candidate in candidates]
        winner = points[race(self._entrants_of(points, guides))]
        self._settled.add(self._key(winner))
        return winner

    def finish(self) -> list[tuple[Coefficients, float]]:
        """Evaluate every candidate to its end, those that lost a race included, and return all with their scores."""
        for coefficients, _ in list(self._entrants.values()):
            self(coefficients)
        return self.tried

    def position(self, coefficients: Coefficients) -> int:
        """Return the position in `tried` of a candidate."""
        return list(self._entrants).index(self._key(coefficients))

    def same(self, coefficients: Coefficients) -> Coefficients:
        """Return the candidate that is equal to some coefficients, to the bit as it was tried; else themselves."""
        entry = self._entrants.get(self._key(coefficients))
        return tuple(coefficients) if entry is None else entry[0]

    @property
    def tried(self) -> list[tuple[Coefficients, float]]:
        """Every candidate in the order of evaluation, with its score, or an upper bound of it: see `unfinished`."""
        return [(coefficients, entrant.bound) for coefficients, entrant in self._entrants.values()]

    @property
    def unfinished(self) -> list[int]:
        """Positions in `tried` of the candidates that lost before their score was known."""
        return [i for i, (_, entrant) in enumerate(self._entrants.values()) if not entrant.is_complete]

    def _entrants_of(self, candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> list[Entrant]:
        new: dict[Coefficients, Coefficients] = {}
        for candidate in candidates:
            if self._key(candidate) not in self._entrants:
                new.setdefault(self._key(candidate), candidate)
        if new:
            missing = list(new.values())
            for candidate, entrant in zip(missing, self._enter(missing, self._guides(missing, guides)), strict=True):
                self._add(candidate, entrant)
        return [self._entrants[self._key(candidate)][1] for candidate in candidates]

    def _guides(self, candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> list[Coefficients]:
        if not guides:
            guides = [v for b, v in enumerate(vertices(len(candidates[0]))) if any(c[b] > 0 for c in candidates)]
        keys = [self._key(guide) for guide in guides]
        return [self._entrants[key][0] for key in keys if key in self._settled]

    def _add(self, coefficients: Coefficients, entrant: Entrant) -> None:
        self._entrants[self._key(coefficients)] = tuple(coefficients), entrant

    @staticmethod
    def _key(coefficients: Coefficients) -> Coefficients:
        return tuple(round(value, _KEY_DECIMALS) for value in coefficients)


def _evaluated(evaluate: Score, candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> list[Entrant]:
    del guides
    return [ScoredEntrant(evaluate(candidate)) for candidate in candidates]
