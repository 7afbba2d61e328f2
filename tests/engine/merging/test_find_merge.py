"""The search of one merge: winners on a sub-sample are confirmed, and lost branches get nothing."""

from __future__ import annotations

from typing import Any, ClassVar

import forkmerge as fm
from forkmerge.engine.merging.find_merge import find_merge
from problems import ScoredMerge


class TestSubSample:
    SAMPLE: ClassVar[dict[tuple[float, ...], float]] = {(1.0, 0.0): 0.0, (0.0, 1.0): 0.0, (0.5, 0.5): 1.0}

    def test_the_best_branch_is_installed_if_the_winner_loses_to_it_on_all_data(self) -> None:
        full = {(1.0, 0.0): 5.0, (0.0, 1.0): 6.0, (0.5, 0.5): 4.0}
        merge = find_merge(ScoredMerge("ab", full.__getitem__, sample=self.SAMPLE.__getitem__), fm.Grid(2))
        assert (merge.coefficients, merge.score) == ({"a": 0.0, "b": 1.0}, 6.0)

    def test_the_winner_stays_if_it_is_as_good_on_all_data(self) -> None:
        full = {(1.0, 0.0): 5.0, (0.0, 1.0): 6.0, (0.5, 0.5): 6.0}
        merge = find_merge(ScoredMerge("ab", full.__getitem__, sample=self.SAMPLE.__getitem__), fm.Grid(2))
        assert (merge.coefficients, merge.score) == ({"a": 0.5, "b": 0.5}, 6.0)
        assert merge.branch_scores == {"a": 5.0, "b": 6.0}
        assert merge.candidates == [
            ({"a": 1.0, "b": 0.0}, 0.0),
            ({"a": 0.0, "b": 1.0}, 0.0),
            ({"a": 0.5, "b": 0.5}, 1.0),
        ]


def test_a_search_that_answers_badly_is_overruled() -> None:
    class Wrong(fm.Search):
        def search(self, score: Any, branches: int) -> tuple[float, ...]:
            return (0.5, 0.5)

        def evaluations(self, branches: int) -> int:
            return 3

    scores = {(1.0, 0.0): 2.0, (0.0, 1.0): 1.0, (0.5, 0.5): 0.0}
    merge = find_merge(ScoredMerge("ab", scores.__getitem__), Wrong())
    assert (merge.coefficients, merge.score) == ({"a": 1.0, "b": 0.0}, 2.0)


def test_uniform_merging_shares_the_part_of_a_lost_branch() -> None:
    problem = ScoredMerge("abc", lambda coefficients: 1.0, faults={"a": "lost"})
    merge = find_merge(problem, fm.Fixed((0.5, 0.25, 0.25)))
    assert merge.coefficients == {"a": 0.0, "b": 0.5, "c": 0.5}
