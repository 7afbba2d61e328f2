"""The candidates of a search: each evaluated once, in the order they were asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forkmerge.engine.merging.arithmetic import Coefficients
from forkmerge.engine.merging.candidates import Candidates
from forkmerge.engine.merging.race import ScoredEntrant
from forkmerge.engine.merging.searches import Grid


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
