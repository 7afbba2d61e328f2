"""From losses to gradients by a method's rule: tasks that are not finite, and answers that are not usable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_close
from forkmerge.engine.training.branch import train_branch
from forkmerge.methods import EW, GCS, Array, GramianMethod, LossMethod, MatrixMethod, MethodState, PCGrad, View
from forkmerge.testing import train_small
from gradient_twins import ONES, Odd, OddMatrix, declared_losses, double_problem, doubled, train_with
from problems import SGD, examples, plain_net, seeded, shared_problem


class TestBadGradients:
    @pytest.mark.parametrize("method", [Odd(), OddMatrix(), EW(), PCGrad()], ids=lambda m: type(m).__name__)
    def test_a_bad_task_is_trained_on_as_if_it_had_no_label(self, method: Any) -> None:
        def bad(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            losses = declared_losses(model, batch, tasks, context)
            return {t: loss * torch.nan if t == "aux" and context.step > 0 else loss for t, loss in losses.items()}

        def missing(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            return declared_losses(model, batch, [t for t in tasks if t != "aux" or context.step == 0], context)

        nets = [seeded(doubled(plain_net)), seeded(doubled(plain_net))]
        results = [
            train_with(net, double_problem(losses), method) for net, losses in zip(nets, (bad, missing), strict=True)
        ]
        assert results[0].reports == {"not finite": {"aux": 3}}
        assert results[1].reports == {}
        # The head of the bad task keeps its momentum, and gets no new gradient, in both.
        assert_close(*nets)

    def test_a_gradient_that_is_bad_in_the_head_only_is_found(self) -> None:
        def losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            losses = declared_losses(model, batch, tasks, context)
            bias = model.heads["odd"].bias
            infinite = (bias - bias.detach()).sum().sqrt()  # 0, with an infinite slope
            return {task: loss + infinite if task == "odd" else loss for task, loss in losses.items()}

        for method in (Odd(), EW()):
            net = seeded(plain_net)
            result = train_with(net, double_problem(losses, TensorDataset(*examples(16, 1))), method)
            assert result.reports == {"not finite": {"odd": 4}}
            assert result.state.is_finite()

    @pytest.mark.parametrize("kind", ["losses", "gramian", "matrix"])
    def test_a_method_whose_answer_is_not_finite_is_replaced_by_the_sum_and_reported(self, kind: str) -> None:
        @dataclass(frozen=True)
        class BadLosses(LossMethod):
            def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
                return losses * torch.nan

        @dataclass(frozen=True)
        class BadGramian(GramianMethod):
            def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
                return np.full(len(gramian), np.inf)

        @dataclass(frozen=True)
        class BadMatrix(MatrixMethod):
            def direction(self, matrix: Tensor, view: View, state: MethodState) -> Tensor:
                return matrix[0] * torch.nan

        method = {"losses": BadLosses(), "gramian": BadGramian(), "matrix": BadMatrix()}[kind]
        nets = [seeded(doubled(plain_net)), seeded(doubled(plain_net))]
        result = train_with(nets[0], double_problem(declared_losses), method)
        train_with(nets[1], double_problem(declared_losses), None)
        assert_close(*nets)
        assert list(result.reports.values()) == [{"all tasks": 4}]

    def test_a_wrong_number_of_weights_is_refused(self) -> None:
        @dataclass(frozen=True)
        class Short(GramianMethod):
            def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
                return np.ones(2)

        with pytest.raises(fm.ProblemError, match=r"Short must return one weight per task of the step, \[3\]"):
            train_with(seeded(plain_net), shared_problem(), Short())

    def test_an_overflow_under_a_scaler_is_the_scalers_to_handle(self) -> None:
        """It skips the step and lowers its scale, as in plain training; the task is not blamed."""
        net = seeded(plain_net)
        training = fm.Training(optimizer=SGD, method=Odd(), precision="float16")
        binding = training.binding(net)
        state = binding.initial()
        binding.scaler.load_state_dict({**binding.scaler.state_dict(), "scale": 2.0**126})
        binding.capture(state)
        before = state.rows["float32"].clone()
        data = TensorDataset(*examples(16, 1))
        result = train_branch(
            binding,
            double_problem(declared_losses, data),
            fm.Mixture("b", ONES),
            state,
            steps=1,
            training=training,
            seed=0,
        )
        assert torch.equal(before, result.state.rows["float32"])
        assert result.state.scaler["scale"] == 2.0**125
        assert result.reports == {}

    def test_losses_that_a_method_sees_are_not_scaled(self) -> None:
        seen: dict[str, list[float]] = {}

        @dataclass(frozen=True)
        class Look(GramianMethod):
            name: str

            def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
                seen[self.name] = [*view.losses, *gramian.flatten()]
                return np.ones(len(gramian))

        data = TensorDataset(*examples(16, 1))
        train_with(seeded(plain_net), double_problem(declared_losses, data), Look("float32"), steps=1)
        train_with(
            seeded(plain_net), double_problem(declared_losses, data), Look("float16"), steps=1, precision="float16"
        )
        assert seen["float16"] == pytest.approx(seen["float32"], rel=0.05, abs=1e-3)


def test_a_branch_without_the_target_is_refused_by_methods_that_need_it() -> None:
    weights = {"helpful": 1.0, "noise": 1.0}
    with pytest.raises(fm.ProblemError, match="GCS compares auxiliaries with the target"):
        train_small(GCS(), weights=weights)
    assert train_small(PCGrad(), weights=weights).state.is_finite()
