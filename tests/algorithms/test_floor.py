"""The floor: the unmerged target-only run is returned where it validates better than the merge."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

import forkmerge as fm
from _asserts import assert_same_bits, bits
from forkmerge.algorithms.events import StepProgress
from problems import (
    Vector,
    diverging_problem,
    evaluation,
    fit,
    noisy_net,
    quadratic_run,
    shared_problem,
    union_problem,
)


class TestFloor:
    HARMFUL: ClassVar[fm.Fixed] = fm.Fixed((0.0, 1.0))

    def test_the_unmerged_target_only_run_is_returned_if_it_validates_better(self) -> None:
        centres: dict[str, Vector] = {"tgt": (1.0, 0.0), "aux": (-9.0, 5.0)}
        algorithm = fm.ForkMerge("mixed", interval=2, search=self.HARMFUL, floor=True)
        run = quadratic_run(algorithm, centres, (1.0, 0.0), lr=0.1, steps=6)
        alone = quadratic_run(fm.SingleTask(), centres, (1.0, 0.0), lr=0.1, steps=6)
        assert run.final == "floor"
        assert_same_bits(run, alone)
        assert run.score == alone.score == run.rounds[-1].floor_score
        assert any("unmerged target-only run validated better" in note for note in run.notes)

    def test_the_merge_is_returned_if_it_is_as_good(self) -> None:
        run = fit(fm.ForkMerge({"alone": {"tgt": 1.0}, "copy": {"tgt": 1.0}}, interval=4, floor=True))
        assert run.final == "last merge"
        assert run.rounds[-1].floor_score == run.score

    def test_the_floor_is_single_task_training_with_the_same_seeds(self) -> None:
        run = fit(fm.ForkMerge("mixed", interval=4, floor=True), net=noisy_net)
        alone = fit(fm.SingleTask(interval=4), net=noisy_net)
        assert [r.floor_score for r in run.rounds] == [r.score for r in alone.rounds]

    def test_the_floor_does_not_change_the_merge(self) -> None:
        with_floor, without = (
            fit(fm.ForkMerge("mixed", interval=4, floor=floor), net=noisy_net) for floor in (True, False)
        )
        assert with_floor.coefficients == without.coefficients
        assert [r.score for r in with_floor.rounds] == [r.score for r in without.rounds]

    def test_a_refit_of_the_floor_trains_the_target_alone_on_the_union(self) -> None:
        branches = {"alone": {"tgt": 1.0}, "joint": {"odd": 1.0}}
        run = fit(fm.ForkMerge(branches, interval=4, search=self.HARMFUL, floor=True, refit=True))
        assert run.final == "refit"
        assert [list(r.branches) for r in run.rounds if r.phase == "refit"] == [["alone"]] * 3
        assert_same_bits(run, fit(fm.SingleTask(), union_problem()))

    def test_where_merges_are_the_floor_its_last_weights_are_the_reference_also_of_the_best_merge(self) -> None:
        centres: dict[str, Vector] = {"tgt": (1.0, 0.0), "aux": (-9.0, 5.0)}
        algorithm = fm.ForkMerge("mixed", interval=2, search=fm.Fixed((1.0, 0.0)), floor=True, select="best")
        run = quadratic_run(algorithm, centres, (0.3, 0.0), lr=0.1, steps=12)
        alone = quadratic_run(fm.SingleTask(interval=2), centres, (0.3, 0.0), lr=0.1, steps=12)
        assert run.final == "best merge"
        assert run.score > alone.score, "the best merge came early"
        assert run.reference is not None
        for name, value in alone.model.state_dict().items():
            assert run.reference[name].equal(value)

    def test_what_is_returned_is_never_worse_than_the_floor_on_all_examples_where_searches_see_a_sample(self) -> None:
        merged = floors = 0
        for seed in range(8):
            options: dict[str, Any] = {"net": noisy_net, "steps": 24, "seed": seed}
            problem = shared_problem(validation=evaluation(200, metrics=fm.accuracy))
            algorithm = fm.ForkMerge(
                "mixed", interval=2, floor=True, select="best", validation_examples=6, search_by="nll"
            )
            run, single = fit(algorithm, problem, **options), fit(fm.SingleTask(), problem, **options)
            assert run.score >= single.score
            merged += run.final != "floor"
            floors += run.final == "floor"
        assert merged
        assert floors

    def test_a_branch_may_be_called_floor(self) -> None:
        branches = {"alone": {"tgt": 1.0}, "floor": {"tgt": 1.0, "aux": 1.0}}
        run = fit(fm.ForkMerge(branches, interval=4))
        named = fit(fm.ForkMerge({"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 1.0}}, interval=4))
        assert_same_bits(run, named)
        for finished in run.rounds:
            assert finished.floor_score is None
            assert set(finished.branches["floor"].losses) == {"tgt", "aux"}

    def test_the_floor_is_returned_if_nothing_else_is_left(self) -> None:
        branches = {"a": {"tgt": 1.0, "odd": 1.0}, "b": {"odd": 1.0}}
        run = fit(fm.ForkMerge(branches, interval=4, floor=True), diverging_problem(4, "odd"))
        assert run.final == "floor"
        assert_same_bits(run, fit(fm.SingleTask()))

    def test_a_floor_that_diverges_is_not_returned(self) -> None:
        branches = {"a": {"aux": 1.0}, "b": {"aux": 0.5}}
        run = fit(fm.ForkMerge(branches, interval=4, floor=True), diverging_problem(4, "tgt"))
        assert run.final == "last merge"
        assert all(tensor.isfinite().all() for tensor in bits(run).values())


class TestShared:
    """The floor is the target-only branch, and costs nothing, until a merge takes something else."""

    def floor_steps(self, algorithm: fm.ForkMerge, **options: Any) -> list[int]:
        events: list[Any] = []
        fit(algorithm, on_event=events.append, **options)
        return [event.step for event in events if isinstance(event, StepProgress) and event.branch == "floor"]

    def test_the_first_round_trains_no_floor_of_its_own(self) -> None:
        algorithm = fm.ForkMerge("mixed", interval=4, search=fm.Fixed((0.5, 0.5)), floor=True)
        assert self.floor_steps(algorithm) == [8, 12]

    def test_it_stays_shared_while_merges_take_the_target_only_branch(self) -> None:
        alone = fm.Fixed((1.0, 0.0))
        assert self.floor_steps(fm.ForkMerge("mixed", interval=4, search=alone, floor=True)) == []
        assert (
            self.floor_steps(fm.ForkMerge("mixed", interval=4, search=alone, floor=True, optimizer_state="average"))
            == []
        )
        reset = fm.ForkMerge("mixed", interval=4, search=alone, floor=True, optimizer_state="reset")
        assert self.floor_steps(reset) == [8, 12]

    def test_without_such_a_branch_it_is_trained_from_the_start(self) -> None:
        no_target_only = {"half": {"tgt": 0.5}, "joint": {"tgt": 1.0, "aux": 1.0}}
        assert self.floor_steps(fm.ForkMerge(no_target_only, interval=4, floor=True)) == [4, 8, 12]
        other_name = {"solo": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 1.0}}
        fixed = fm.ForkMerge(other_name, interval=4, search=fm.Fixed((0.5, 0.5)), floor=True)
        assert self.floor_steps(fixed) == [8, 12]
        assert self.floor_steps(fixed, paired=False) == [4, 8, 12], "its examples would be others"

    @pytest.mark.parametrize("policy", ["keep", "average", "reset"])
    @pytest.mark.parametrize("checkpoint", ["last", "best_in_interval"])
    def test_its_scores_are_those_of_single_task_training(self, policy: Any, checkpoint: Any) -> None:
        options: dict[str, Any] = {"optimizer_state": policy, "checkpoint": checkpoint, "validate_every": 2}
        for search in (fm.Fixed((1.0, 0.0)), fm.Fixed((0.3, 0.7)), fm.Grid()):
            run = fit(
                fm.ForkMerge(interval=4, search=search, floor=True, **{"mixtures": "mixed", **options}), net=noisy_net
            )
            alone = fit(fm.SingleTask(interval=4), net=noisy_net)
            assert [r.floor_score for r in run.rounds] == [r.score for r in alone.rounds]
