"""The search of one merge: winners on a sub-sample are confirmed, and lost branches get nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import forkmerge as fm
from forkmerge.engine.merging.arithmetic import Coefficients
from forkmerge.engine.merging.find_merge import MergeProblem, find_merge
from forkmerge.engine.merging.race import Entrant, ScoredEntrant
from problems import ScoredMerge


class TestSubSample:
    SAMPLE: ClassVar[dict[tuple[float, ...], float]] = {(1.0, 0.0): 0.0, (0.0, 1.0): 0.0, (0.5, 0.5): 1.0}

    def test_the_best_branch_is_installed_if_the_winner_loses_to_it_on_all_data(self) -> None:
        for best, vertex in (("a", (1.0, 0.0)), ("b", (0.0, 1.0))):
            full = {(1.0, 0.0): 5.0, (0.0, 1.0): 5.0, (0.5, 0.5): 4.0, vertex: 6.0}
            merge = find_merge(ScoredMerge("ab", full.__getitem__, sample=self.SAMPLE.__getitem__), fm.Grid(2))
            assert (merge.coefficients, merge.score) == ({"a": 0.0, "b": 0.0, best: 1.0}, 6.0)

    def test_a_branch_that_wins_on_the_sample_has_its_score_on_all_data(self) -> None:
        sample = {(1.0, 0.0): 0.0, (0.0, 1.0): 2.0, (0.5, 0.5): 1.0}
        full = {(1.0, 0.0): 5.0, (0.0, 1.0): 6.0}
        merge = find_merge(ScoredMerge("ab", full.__getitem__, sample=sample.__getitem__), fm.Grid(2))
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


def test_candidates_of_the_usable_branches_are_entered_at_once_with_a_coefficient_for_every_branch() -> None:
    calls: list[tuple[list[Coefficients], list[Coefficients]]] = []

    class Many(ScoredMerge):
        def enter(self, candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> list[Entrant]:
            calls.append((list(candidates), list(guides)))
            return [ScoredEntrant(-abs(c[0] - 0.4) - abs(c[-1] - 0.3)) for c in candidates]

    problem = Many(["a", "bad", "b", "c"], lambda coefficients: -2.0, faults={"bad": "it diverged"})
    merge = find_merge(problem, fm.Greedy())
    assert [len(candidates) for candidates, _ in calls] == [5, 5]
    assert all(len(c) == 4 and c[1] == 0 for candidates, guides in calls for c in (*candidates, *guides))
    assert calls[0][1] == [(1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)]
    assert merge.coefficients["bad"] == 0
    assert merge.score == max(score for _, score in merge.candidates)
    assert all(list(point) == ["a", "bad", "b", "c"] for point, _ in merge.candidates)
    assert merge.faults == {"bad": "it diverged"}
    assert merge.branch_scores == {"a": -2.0, "bad": -math.inf, "b": -2.0, "c": -2.0}


def test_a_branch_whose_score_is_not_finite_is_at_fault_and_without_any_usable_branch_there_is_no_merge() -> None:
    scores = {(1.0, 0.0): math.nan, (0.0, 1.0): 1.0}
    merge = find_merge(ScoredMerge("ab", scores.__getitem__), fm.Grid(2))
    assert merge.faults == {"a": "its validation score is not finite"}
    assert (merge.coefficients, merge.score, merge.vector) == ({"a": 0.0, "b": 1.0}, 1.0, (0.0, 1.0))
    merge = find_merge(ScoredMerge("ab", lambda c: math.inf, faults={"a": "lost"}), fm.Grid(2))
    assert merge.faults == {"a": "lost", "b": "its validation score is not finite"}
    assert (merge.coefficients, merge.score, merge.vector, merge.candidates) == ({}, -math.inf, (), [])


def test_fixed_coefficients_of_nothing_but_lost_branches_leave_the_first_usable_one() -> None:
    problem = ScoredMerge("abc", lambda coefficients: 1.0, faults={"a": "lost"})
    assert find_merge(problem, fm.Fixed((1.0, 0.0, 0.0))).coefficients == {"a": 0.0, "b": 1.0, "c": 0.0}


def test_fixed_coefficients_stay_to_the_last_bit_and_may_be_worse_than_a_branch() -> None:
    scores = {(1.0, 0.0): 5.0, (0.0, 1.0): 6.0, (0.3, 0.7): 1.0}
    for sample in (None, lambda coefficients: 0.0):
        merge = find_merge(ScoredMerge("ab", scores.__getitem__, sample=sample), fm.Fixed((0.3, 0.7)))
        assert (merge.coefficients, merge.score) == ({"a": 0.3, "b": 0.7}, 1.0)


def test_a_problem_without_a_race_of_its_own_scores_every_candidate_and_has_no_sample() -> None:
    class Plain(MergeProblem):
        def score_branch(self, index: int) -> float:
            return float(index)

        def score(self, coefficients: Coefficients) -> float:
            return 3.0 - abs(coefficients[1] - 0.5)

    problem = Plain(["a", "b"])
    assert (problem.names, problem.faults, problem.on_sample) == (("a", "b"), {}, False)
    assert problem.sample_score_of_branch(1) == 1.0
    merge = find_merge(problem, fm.Grid(2))
    assert (merge.coefficients, merge.score, merge.unfinished) == ({"a": 0.5, "b": 0.5}, 3.0, [])
