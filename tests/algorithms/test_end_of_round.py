"""The end of a round: the merge is searched, doubted and installed, and branches are pruned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

import forkmerge as fm
from _asserts import assert_same_bits
from forkmerge.algorithms.run_record import Run
from problems import counting_steps, domains_problem, evaluation, fit, minus_loss, noisy_net, shared_problem


@dataclass(frozen=True)
class Script(fm.Search):
    """Answers with prepared coefficients, by the number of branches, and scores nothing."""

    answers: tuple[tuple[float, ...], ...]
    guarded: ClassVar[bool] = False

    def search(self, score: Any, branches: int) -> tuple[float, ...]:
        return next(answer for answer in self.answers if len(answer) == branches)

    def evaluations(self, branches: int) -> int:
        return 0


class TestPruning:
    BRANCHES: ClassVar[dict[str, dict[str, float]]] = {
        "small": {"tgt": 1.0, "aux": 0.5},
        "big": {"tgt": 1.0, "aux": 1.0},
        "none": {"tgt": 1.0, "odd": 1.0},
        "alone": {"tgt": 1.0},
    }

    def kept(self, answers: Any, **options: Any) -> Run:
        return fit(fm.ForkMerge(self.BRANCHES, interval=3, search=Script(answers), **options), steps=9)

    def test_the_largest_stay_and_the_target_only_branch_counts_even_at_zero(self) -> None:
        run = self.kept(((0.3, 0.6, 0.1, 0.0), (0.5, 0.5)), prune_to=2)
        assert [r.kept for r in run.rounds] == [["big", "alone"]] * 3
        assert [list(r.branches) for r in run.rounds[1:]] == [["big", "alone"]] * 2

    def test_branches_of_coefficient_zero_are_dropped_even_if_there_is_room(self) -> None:
        run = self.kept(((0.0, 1.0, 0.0, 0.0), (0.5, 0.5)), prune_to=3)
        assert run.rounds[0].kept == ["big", "alone"]

    def test_the_target_only_branch_may_be_the_only_one_left(self) -> None:
        run = self.kept(((0.0, 1.0, 0.0, 0.0), (1.0,)), prune_to=1)
        assert run.rounds[0].kept == ["alone"]
        assert run.rounds[-1].coefficients == {"alone": 1.0}

    def test_the_largest_coefficients_may_be_kept_whichever_branches_they_are(self) -> None:
        run = self.kept(((0.3, 0.6, 0.1, 0.0), (0.5, 0.5)), prune_to=2, prune_keeps="largest")
        assert [r.kept for r in run.rounds] == [["small", "big"]] * 3
        run = self.kept(((0.2, 0.5, 0.0, 0.3), (0.5, 0.5)), prune_to=2, prune_keeps="largest")
        assert run.rounds[0].kept == ["big", "alone"], "the target's too, if it is large"
        run = self.kept(((0.0, 1.0, 0.0, 0.0), (1.0,)), prune_to=3, prune_keeps="largest")
        assert run.rounds[0].kept == ["big"], "none of coefficient 0, also where there is room"

    def test_of_equal_coefficients_the_branch_listed_first_is_kept(self) -> None:
        run = self.kept(((0.25, 0.25, 0.25, 0.25), (0.5, 0.5)), prune_to=2, prune_keeps="largest")
        assert run.rounds[0].kept == ["small", "big"]

    @pytest.mark.parametrize("options", [{"floor": True}, {"refit": True}, {"floor": True, "refit": True}])
    def test_a_floor_and_a_refit_need_no_target_only_branch(self, options: dict[str, bool]) -> None:
        run = self.kept(((0.3, 0.6, 0.1, 0.0), (0.5, 0.5)), prune_to=2, prune_keeps="largest", **options)
        assert all(r.kept == ["small", "big"] for r in run.rounds)
        if "floor" in options:
            assert run.rounds[2].floor_score == fit(fm.SingleTask(interval=3), steps=9).score

    def test_it_happens_after_the_round_asked_for(self) -> None:
        run = self.kept(((0.3, 0.6, 0.1, 0.0), (0.5, 0.5)), prune_to=2, prune_after=2)
        assert [len(r.branches) for r in run.rounds] == [4, 4, 2]

    def test_a_pruned_branch_costs_nothing_any_more(self, monkeypatch: Any) -> None:
        with counting_steps(monkeypatch) as trained:
            self.kept(((0.3, 0.6, 0.1, 0.0), (0.5, 0.5)), prune_to=2)
        assert trained == ["small", "big", "none", "alone", "big", "alone", "big", "alone"]


class TestConfidence:
    """The target-only branch stays unless the merge is surely better."""

    def run(self, confidence: float | None, **options: Any) -> Run:
        algorithm = fm.ForkMerge(
            **{"mixtures": "mixed", "interval": 4, "search": fm.Fixed(), **options}, confidence=confidence
        )
        return fit(algorithm, shared_problem(metrics=fm.nll))

    def test_what_the_search_found_counts_if_it_wins_often_enough(self) -> None:
        plain, sure = self.run(None), self.run(0.001)
        assert all(r.coefficients["alone"] == 0.5 for r in plain.rounds)
        assert_same_bits(plain, sure)
        assert [r.certainty for r in plain.rounds] == [None] * 3

    def test_otherwise_it_is_training_on_the_target_alone(self) -> None:
        run = self.run(0.999999)
        assert [r.coefficients["alone"] for r in run.rounds] == [1.0] * 3
        assert [r.score for r in run.rounds] == [r.branches["alone"].score for r in run.rounds]
        assert all(r.metrics == r.branches["alone"].metrics for r in run.rounds)
        assert_same_bits(run, fit(fm.SingleTask(interval=4), shared_problem(metrics=fm.nll)))
        assert all(r.certainty is None or r.certainty < 0.999999 for r in run.rounds)
        assert any(r.certainty is not None for r in run.rounds)

    def test_a_metric_that_does_not_add_up_is_refused_before_training(self, monkeypatch: Any) -> None:
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.ProblemError, match="metrics that add up"):
            fit(fm.ForkMerge("mixed", interval=4, confidence=0.9))
        assert trained == []


def test_no_candidate_is_evaluated_twice() -> None:
    for search in (fm.Grid(4), fm.Greedy()):
        for finished in fit(fm.ForkMerge("per_auxiliary", interval=4, search=search), net=noisy_net).rounds:
            tried = [tuple(round(v, 9) for v in c.coefficients.values()) for c in finished.candidates]
            assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("search", [fm.Grid(), fm.Grid(3), fm.Greedy(), fm.Binary()])
@pytest.mark.parametrize("examples_used", [None, 3])
def test_merged_validation_score_is_at_least_every_branch(search: fm.Search, examples_used: int) -> None:
    mixtures = "mixed" if isinstance(search, fm.Binary) else "per_auxiliary"
    algorithm = fm.ForkMerge(mixtures, interval=3, search=search, search_examples=examples_used)
    for seed in range(2):
        for finished in fit(algorithm, net=noisy_net, seed=seed).rounds:
            assert finished.score >= max(branch.score for branch in finished.branches.values())


def test_pruning_waits_for_a_round_with_coefficients() -> None:
    calls = {"n": 0}

    def metric(predictions: Tensor, targets: Tensor) -> float:
        calls["n"] += 1
        return float("nan") if 1 < calls["n"] <= 5 else minus_loss(predictions, targets)

    problem = domains_problem(validation=evaluation(metrics=metric))
    run = fit(fm.ForkMerge("per_auxiliary", interval=2, prune_to=1), problem, steps=6)
    assert run.rounds[0].coefficients == {}
    first = next(r for r in run.rounds if r.coefficients)
    assert first.kept == ["alone"]
