"""The candidates of a search: each evaluated once, in the order they were asked for."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from forkmerge.engine.merging import candidates
from forkmerge.engine.merging.arithmetic import Coefficients, vertices
from forkmerge.engine.merging.candidates import Candidates
from forkmerge.engine.merging.race import ScoredEntrant
from forkmerge.engine.merging.searches import Grid
from forkmerge.errors import ProblemError


def test_candidates_start_with_the_known_and_keep_the_order_of_evaluation() -> None:
    calls: list[Coefficients] = []

    def evaluate(coefficients: Coefficients) -> float:
        calls.append(coefficients)
        return math.nan

    score = Candidates(evaluate, branch_scores={(1.0, 0.0): 2.0, (0.0, 1.0): math.nan})
    assert score((0.3, 0.7)) == -math.inf
    assert score((0.1 + 0.2, 0.7)) == -math.inf  # the same candidate up to rounding
    assert score((1.0, 0.0)) == 2.0
    assert calls == [(0.3, 0.7)]
    assert score.tried == [((1.0, 0.0), 2.0), ((0.0, 1.0), -math.inf), ((0.3, 0.7), -math.inf)]


def test_of_equal_candidates_the_first_is_best() -> None:
    score = Candidates(lambda coefficients: 1.0)
    assert score.best_among([(0.0, 1.0), (1.0, 0.0)]) == (0.0, 1.0)


class TestFullPassesAtOnce:
    def test_searches_hand_over_all_candidates_that_do_not_depend_on_one_another(self) -> None:
        calls: list[list[Coefficients]] = []

        def many(candidates: Sequence[Coefficients]) -> list[float]:
            calls.append(list(candidates))
            return [-abs(c[1] - 0.4) for c in candidates]

        score = Candidates(enter=lambda candidates, guides: [ScoredEntrant(s) for s in many(candidates)])
        assert Grid().search(score, 2) == (0.6, 0.4)
        assert [len(call) for call in calls] == [6]

    def test_equal_candidates_are_handed_over_once(self) -> None:
        calls: list[list[Coefficients]] = []

        def many(candidates: Sequence[Coefficients]) -> list[float]:
            calls.append(list(candidates))
            return [0.0] * len(candidates)

        score = Candidates(enter=lambda candidates, guides: [ScoredEntrant(s) for s in many(candidates)])
        assert score.best_among([(0.3, 0.7), (0.1 + 0.2, 0.7), (1.0, 0.0)]) == (0.3, 0.7)
        assert calls == [[(0.3, 0.7), (1.0, 0.0)]]

    def test_candidates_given_twice_are_tried_in_the_order_they_came(self) -> None:
        score = Candidates(lambda c: -c[0])
        assert score.best_among([(0.5, 0.5), (0.2, 0.8), (0.5, 0.5)]) == (0.2, 0.8)
        assert [c for c, _ in score.tried] == [(0.5, 0.5), (0.2, 0.8)]


class TestGuides:
    """Whose costs tell where new candidates may err: only those that are complete however others are evaluated."""

    def entered(self, score_of: Callable[[Coefficients], float], **options: Any) -> tuple[Candidates, list[Any]]:
        calls: list[Any] = []

        def enter(candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> list[ScoredEntrant]:
            calls.append((list(candidates), list(guides)))
            return [ScoredEntrant(score_of(candidate)) for candidate in candidates]

        return Candidates(enter=enter, **options), calls

    def test_they_are_the_scored_branches_that_the_candidates_are_made_of(self) -> None:
        singles = vertices(3)
        score, calls = self.entered(lambda c: 0.0, branch_scores=dict.fromkeys(singles, 1.0))
        score.best_among([(0.5, 0.5, 0.0)])
        score.best_among([(0.2, 0.0, 0.8), (0.0, 0.3, 0.7)])
        assert calls == [
            ([(0.5, 0.5, 0.0)], singles[:2]),
            ([(0.2, 0.0, 0.8), (0.0, 0.3, 0.7)], singles),
        ]
        score, calls = self.entered(lambda c: 0.0, branch_scores={singles[1]: 1.0})
        score.best_among([(0.5, 0.5, 0.0)])
        assert calls == [([(0.5, 0.5, 0.0)], singles[1:2])]

    def test_or_those_that_are_named_if_they_are_answers_of_earlier_calls(self) -> None:
        score, calls = self.entered(lambda c: c[0])
        best, worse = (0.8, 0.2), (0.6, 0.4)
        assert score.best_among([worse, best]) == best
        assert score((0.4, 0.6)) == 0.4
        score.best_among([(0.5, 0.5)], guides=[best, worse, (0.4, 0.6), (0.1, 0.9)])
        assert calls[-1] == ([(0.5, 0.5)], [best, (0.4, 0.6)])

    def test_a_candidate_that_was_entered_is_not_entered_again(self) -> None:
        score, calls = self.entered(lambda c: c[0])
        score.best_among([(0.5, 0.5)])
        score.best_among([(0.5, 0.5)])
        score((0.5, 0.5))
        assert len(calls) == 1


def test_candidates_without_a_score_or_entrants_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"^candidates need a score function, or entrants of a race\.$"):
        Candidates()


def test_the_example_in_the_docstring_holds() -> None:
    result = doctest.testmod(candidates)
    assert (result.attempted > 0, result.failed) == (True, 0)


def test_all_can_be_finished_and_looked_up_to_rounding() -> None:
    score = Candidates(lambda coefficients: -coefficients[0], branch_scores={(1.0, 0.0): 2.0, (0.0, 1.0): 1.0})
    score.best_among([(0.3, 0.7), (0.6, 0.4)])
    assert [value for _, value in score.finish()] == [2.0, 1.0, -0.3, -0.6]
    assert score.position((0.1 + 0.2, 0.7)) == 2
    assert score.same((0.1 + 0.2, 0.7)) == (0.3, 0.7)
    assert score.same((0.25, 0.75)) == (0.25, 0.75)
