"""The refit: the merges that were found are replayed on training and validation data, without any search."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_other_bits, assert_same_bits, bits
from forkmerge.algorithms.run_record import Run
from problems import (
    diverging_problem,
    domains_problem,
    examples,
    fit,
    minus_loss,
    noisy_net,
    predict_target,
    quadratic_run,
    shared_problem,
    union_problem,
)


class Replay(fm.Search):
    """Answers with the coefficients of an earlier run, round by round."""

    guarded: ClassVar[bool] = False

    def __init__(self, run: Run) -> None:
        self.rounds = iter([tuple(r.coefficients[name] for name in r.branches) for r in run.searched])

    def search(self, score: Any, branches: int) -> tuple[float, ...]:
        return next(self.rounds)

    def evaluations(self, branches: int) -> int:
        return 0


class TestRefit:
    def test_it_trains_on_training_and_validation_data_of_the_target(self) -> None:
        union = union_problem().stream_map["all"].dataset
        inputs = torch.cat([examples(16, 1)[0], examples(24, 2)[0]])
        assert torch.equal(union.tensors[0], inputs)

    def test_other_streams_keep_their_data(self) -> None:
        union = domains_problem().with_validation_labels()
        assert [len(stream.dataset) for stream in union.stream_map.values()] == [20 + 24, 30, 40]

    @pytest.mark.parametrize("bn", ["average", "recompute"])
    def test_it_is_the_found_run_replayed_on_the_union_without_search(self, bn: Any) -> None:
        options: dict[str, Any] = {"interval": 4, "bn": bn, "prune_to": 2}
        run = fit(fm.ForkMerge("per_auxiliary", refit=True, **options), net=noisy_net, steps=10)
        assert run.final == "refit"
        replayed = [r for r in run.rounds if r.phase == "refit"]
        assert [r.end for r in replayed] == [4, 8, 10]
        for searched, refitted in zip(run.searched, replayed, strict=True):
            assert refitted.coefficients == searched.coefficients
            assert refitted.kept == searched.kept
            assert list(refitted.branches) == list(searched.branches)
            assert refitted.candidates == []
            assert refitted.score is None
        twin = fit(fm.ForkMerge("per_auxiliary", search=Replay(run), **options), union_problem(), noisy_net, steps=10)
        assert_same_bits(run, twin)

    def test_no_validation_pass_happens_in_it(self) -> None:
        calls: list[int] = []

        def counted(predictions: Any, targets: Any) -> float:
            calls.append(1)
            return minus_loss(predictions, targets)

        counts = []
        for refit in (False, True):
            calls.clear()
            fit(fm.ForkMerge(interval=4, refit=refit), shared_problem(metrics={"m": counted}))
            counts.append(len(calls))
        assert counts[0] == counts[1]

    def test_the_score_reported_is_that_of_the_search(self) -> None:
        searched, refitted = (fit(fm.ForkMerge(interval=4, refit=refit)) for refit in (False, True))
        assert (refitted.score, refitted.metrics) == (searched.score, searched.metrics)
        assert_other_bits(searched, refitted)

    @pytest.mark.parametrize("policy", ["best_in_interval", "best_so_far"])
    def test_checkpoint_steps_are_replayed(self, policy: Any) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", interval=6, refit=True, checkpoint=policy, validate_every=2)
        run = fit(algorithm, net=noisy_net, steps=15, optimizer=fm.OptimizerOf("SGD", lr=1.0, momentum=0.9))
        steps = {
            phase: [[b.entered_step for b in r.branches.values()] for r in run.rounds if r.phase == phase]
            for phase in ("search", "refit")
        }
        assert steps["search"] == steps["refit"]
        assert any(step < r.end for r, entered in zip(run.searched, steps["search"], strict=True) for step in entered)

    def test_as_training_is_the_form_that_is_joined(self) -> None:
        inputs, labels = examples(24, 2)
        validation = fm.Evaluation(
            TensorDataset(inputs, labels[:, 0]), minus_loss, as_training=TensorDataset(inputs, labels)
        )
        run = fit(fm.ForkMerge(interval=4, refit=True), shared_problem(validation=validation))
        assert_same_bits(run, fit(fm.ForkMerge(interval=4, refit=True)))

    @staticmethod
    def poisoned() -> fm.Problem:
        """Validation examples that spoil training, but not the first of them, which is tried beforehand."""
        inputs, labels = examples(24, 2)
        bad = inputs.clone()
        bad[1:] = torch.inf
        validation = fm.Evaluation(
            TensorDataset(inputs, labels), minus_loss, predict_target, as_training=TensorDataset(bad, labels)
        )
        return shared_problem(validation=validation)

    def test_a_refit_that_diverges_returns_the_searched_model_with_a_note(self) -> None:
        run = fit(fm.ForkMerge(interval=4, refit=True), self.poisoned())
        searched = fit(fm.ForkMerge(interval=4))
        assert_same_bits(run, searched)
        assert run.final == "last merge"
        assert run.score == searched.score
        assert any("refit given up at step 4: branch" in note for note in run.notes)

    def test_a_refit_without_search_that_diverges_at_once_fails(self) -> None:
        with pytest.raises(fm.RunFailed, match="nothing was learned: refit given up at step 3: branch 'alone'"):
            fit(fm.SingleTask(refit=True), self.poisoned())

    @pytest.mark.parametrize("algorithm", [fm.SingleTask(refit=True), fm.Joint({"tgt": 1.0}, refit=True)])
    def test_one_branch_needs_no_search_and_trains_once_on_the_union(self, algorithm: Any) -> None:
        run = fit(algorithm)
        assert {r.phase for r in run.rounds} == {"refit"}
        assert_same_bits(run, fit(fm.SingleTask(), union_problem()))
        assert run.score is None
        assert run.metrics == {}

    def test_one_branch_with_its_best_step_is_refitted_to_that_step(self) -> None:
        # θ runs .5, .75, … towards 1 and validation wants .75; the refit pulls towards both, with mean .875.
        algorithm = fm.SingleTask(interval=1, select="best", refit=True)
        run = quadratic_run(algorithm, {"tgt": (1.0, 0.0)}, (0.75, 0.0), lr=0.5, steps=4)
        assert [(r.phase, r.end) for r in run.rounds if r.phase == "refit"] == [("refit", 1), ("refit", 2)]
        assert run.score == 0.0

    def test_a_replayed_round_in_which_every_branch_was_faulty_keeps_its_state(self) -> None:
        problem = diverging_problem(4, "tgt")
        run = fit(fm.ForkMerge(interval=4, refit=True), problem)
        assert run.rounds[1].coefficients == {}
        assert run.final == "refit"
        assert all(tensor.isfinite().all() for tensor in bits(run).values())
