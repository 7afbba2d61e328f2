"""Branches that diverge: they are named, get coefficient 0, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_same_bits, bits
from problems import (
    ADAM,
    SGD,
    TASKS,
    diverge_from,
    diverging_problem,
    evaluation,
    examples,
    fit,
    minus_loss,
    noisy_net,
    shared_losses,
)


def _nan_once(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
    losses = shared_losses(model, batch, tasks, context)
    return {t: loss * torch.nan if t == "odd" and context.step == 4 else loss for t, loss in losses.items()}


class TestDivergence:
    @pytest.mark.parametrize("policy", ["keep", "average", "reset"])
    @pytest.mark.parametrize("optimizer", [SGD, ADAM])
    def test_a_branch_that_diverges_gets_coefficient_zero_is_named_and_does_not_leak(
        self, optimizer: Any, policy: Any
    ) -> None:
        stream = fm.Stream(TensorDataset(*examples(16, 1)), _nan_once, TASKS, 8)
        problem = fm.Problem("tgt", {"all": stream}, evaluation())
        algorithm = fm.ForkMerge("per_auxiliary", interval=3, optimizer_state=policy, search=fm.Fixed())
        run = fit(algorithm, problem, noisy_net, optimizer=optimizer, steps=9)
        first, second, third = run.rounds
        assert second.coefficients == {"alone": 0.5, "aux": 0.5, "odd": 0.0}
        assert second.branches["odd"].fault == "its training loss of tgt, odd is not finite from step 4 on"
        assert second.branches["odd"].score is None
        assert f"round 2: branch 'odd' got coefficient 0: {second.branches['odd'].fault}" in run.notes
        assert first.branches["odd"].fault is None
        # It comes back with the merged weights and a fresh optimizer.
        assert third.branches["odd"].fault is None
        assert third.coefficients["odd"] == pytest.approx(1 / 3)
        assert all(tensor.isfinite().all() for tensor in bits(run).values())

    def test_a_snapshot_from_before_the_divergence_is_not_replaced_by_weights_that_are_not_finite(self) -> None:
        def always_better(predictions: Any, targets: Any) -> float:
            calls.append(1)
            return float(len(calls))

        calls: list[int] = []
        stream = fm.Stream(TensorDataset(*examples(16, 1)), diverge_from(2, "odd"), TASKS, 8)
        problem = fm.Problem("tgt", {"all": stream}, evaluation(metrics=always_better))
        algorithm = fm.ForkMerge("per_auxiliary", interval=4, checkpoint="best_in_interval", validate_every=2)
        (only,) = fit(algorithm, problem, steps=4).rounds
        assert [branch.entered_step for branch in only.branches.values()] == [4, 4, 2]
        assert only.branches["odd"].fault is None

    def test_parameters_that_are_not_finite_are_found_also_behind_a_finite_score(self) -> None:
        # accuracy of NaN logits is a number: class 0 is right now and then.
        algorithm = fm.ForkMerge("per_auxiliary", interval=4, checkpoint="best_in_interval", validate_every=4)
        run = fit(algorithm, diverging_problem(2, "odd"), steps=4)
        assert run.rounds[0].branches["odd"].fault == "it has parameters that are not finite"
        assert run.rounds[0].coefficients["odd"] == 0

    def test_if_every_branch_diverges_the_last_good_state_is_kept_bit_for_bit(self) -> None:
        run = fit(fm.ForkMerge("mixed", interval=4), diverging_problem(4, "tgt"), noisy_net)
        good = fit(fm.ForkMerge("mixed", interval=4), diverging_problem(99, "tgt"), noisy_net, steps=4)
        assert_same_bits(run, good)
        assert [r.coefficients for r in run.rounds[1:]] == [{}, {}]
        assert [r.score for r in run.rounds[1:]] == [None, None]
        assert "step 8: every branch was faulty; the last good state was kept" in run.notes
        assert run.metrics == good.metrics

    def test_the_best_merge_is_returned_though_later_rounds_are_lost(self) -> None:
        run = fit(fm.ForkMerge("mixed", interval=4, select="best"), diverging_problem(4, "tgt"), noisy_net)
        assert run.final == "best merge"
        assert run.score == run.rounds[0].score


def test_a_diverged_target_only_branch_is_not_what_several_metrics_are_compared_with() -> None:
    stream = fm.Stream(TensorDataset(*examples(16, 1)), diverge_from(1, "tgt"), TASKS, 8)
    problem = fm.Problem("tgt", stream, evaluation(metrics={"accuracy": fm.accuracy, "score": minus_loss}))
    branches = {"alone": {"tgt": 1.0}, "aux": {"aux": 1.0}}
    run = fit(fm.ForkMerge(branches, interval=2), problem, steps=2)
    assert run.rounds[0].coefficients == {"alone": 0.0, "aux": 1.0}
    assert any("compared with the fork point" in note for note in run.notes)
