"""BatchNorm statistics of a merge: averaged like parameters, or recomputed on the target's training data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_same_bits
from forkmerge.algorithms.run_record import Run
from problems import TASKS, evaluation, examples, fit, noisy_net, shared_losses, shared_problem


def mean_of(run: Run) -> torch.Tensor:
    return run.model.body[1].running_mean


class TestBatchNormPolicies:
    def test_average_combines_statistics_like_parameters(self) -> None:
        merged = fit(fm.ForkMerge(interval=4, search=fm.Fixed((0.3, 0.7))), net=noisy_net, steps=4)
        alone, joint = (fit(fm.Joint(w), net=noisy_net, steps=4) for w in ({"tgt": 1.0}, dict.fromkeys(TASKS, 1.0)))
        torch.testing.assert_close(mean_of(merged), 0.3 * mean_of(alone) + 0.7 * mean_of(joint))

    def test_recompute_takes_them_from_the_targets_training_data(self) -> None:
        inputs, labels = examples(16, 1)
        stream = fm.Stream(TensorDataset(inputs, labels), shared_losses, TASKS, batch_size=16)
        problem = fm.Problem("tgt", {"all": stream}, evaluation())
        algorithm = fm.ForkMerge(interval=4, search=fm.Fixed((0.3, 0.7)), bn="recompute", bn_batches=3)
        run = fit(algorithm, problem, noisy_net, steps=4)
        norm = run.model.body[1]
        before = run.model.body[0](inputs).detach()  # every batch is the whole data set
        torch.testing.assert_close(norm.running_mean, before.mean(0))
        torch.testing.assert_close(norm.running_var, before.var(0))
        assert norm.num_batches_tracked == 4
        assert norm.momentum == 0.1

    def test_recompute_leaves_a_single_branch_as_it_is(self) -> None:
        one, other = (
            fit(fm.ForkMerge(interval=4, search=fm.Fixed((0.0, 1.0)), bn=bn), net=noisy_net)
            for bn in ("average", "recompute")
        )
        assert_same_bits(one, other)

    def test_recompute_without_batchnorm_changes_nothing(self) -> None:
        one, other = (fit(fm.ForkMerge(interval=4, search="fixed", bn=bn)) for bn in ("average", "recompute"))
        assert_same_bits(one, other)

    @pytest.mark.parametrize("bn", ["average", "recompute"])
    def test_candidates_are_scored_exactly_as_they_are_installed(self, bn: Any) -> None:
        problem = shared_problem()
        algorithm = fm.ForkMerge("per_auxiliary", interval=6, bn=bn)
        run = fit(algorithm, problem, noisy_net, steps=18)
        assert any(0 < share < 1 for c in run.coefficients for share in c.values())
        installed = fm.measure(run.model, problem.target_validation)
        assert installed == {"minus_loss": run.rounds[-1].score} == run.metrics
        for finished in run.rounds:
            chosen = [c.score for c in finished.candidates if c.coefficients == finished.coefficients]
            assert chosen == [finished.score]
