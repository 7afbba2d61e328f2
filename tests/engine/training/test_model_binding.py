"""One module and one optimizer at work on many states: any module, any optimizer, any schedule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

import forkmerge as fm
from _asserts import assert_same_bits, bits, same_bits
from branch_training import WEIGHTS, resumed_bits, train
from forkmerge.engine.training.branch import train_branch
from problems import (
    ADAM,
    SGD,
    Bag,
    Net,
    fit,
    frozen_net,
    noisy_net,
    plain_loop,
    plain_net,
    seeded,
    shared_problem,
    tied_net,
)


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["shared"]["count"] = self.state["shared"].get("count", 0) + 1
        super().step(closure)


def test_optimizer_state_that_belongs_to_no_parameter_is_refused_by_name() -> None:
    with pytest.raises(fm.ProblemError, match="Counting keeps state under 'shared'"):
        fm.SingleTask().fit(
            shared_problem(), model=plain_net, optimizer=lambda m: Counting(m.parameters(), lr=0.1), steps=1
        )


def CosineOf10(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, T_max=10)


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> SequentialLR:
    warm = LinearLR(optimizer, start_factor=0.1, total_iters=3)
    return SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, T_max=7)], milestones=[3])


def inverse_root(step: int) -> float:
    return 1 / math.sqrt(1 + step)


def lambda_schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, inverse_root)


SCHEDULERS = {
    "CosineAnnealingLR": CosineOf10,
    "StepLR": fm.SchedulerOf("StepLR", step_size=3),
    "MultiStepLR": fm.SchedulerOf("MultiStepLR", milestones=[2, 4, 4, 8]),
    "ExponentialLR": fm.SchedulerOf("ExponentialLR", gamma=0.9),
    "OneCycleLR": fm.SchedulerOf("OneCycleLR", max_lr=0.3, total_steps=11),
    "CyclicLR": fm.SchedulerOf("CyclicLR", base_lr=0.01, max_lr=0.3, step_size_up=3),
    "CosineAnnealingWarmRestarts": fm.SchedulerOf("CosineAnnealingWarmRestarts", T_0=4),
    "PolynomialLR": fm.SchedulerOf("PolynomialLR", total_iters=8),
    "SequentialLR": warm_up_then_cosine,
    "LambdaLR": lambda_schedule,
}


class TestSchedules:
    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_a_schedule_over_segments_and_resumes_is_that_of_a_plain_loop(self, name: str) -> None:
        scheduler = SCHEDULERS[name]
        ours = resumed_bits(plain_net, SGD, scheduler)
        assert_same_bits(ours, plain_loop(plain_net, SGD, WEIGHTS, 10, scheduler=scheduler))
        assert not same_bits(ours, plain_loop(plain_net, SGD, WEIGHTS, 10)), "the schedule should matter"

    def test_the_schedule_runs_on_across_merges(self) -> None:
        rates: list[float] = []

        class Watched(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                rates.append(self.param_groups[0]["lr"])
                return super().step(closure)

        def watched(model: nn.Module) -> torch.optim.Optimizer:
            return Watched(model.parameters(), lr=1.0)

        fit(
            fm.ForkMerge("mixed", interval=2, optimizer_state="reset"),
            optimizer=watched,
            scheduler=fm.SchedulerOf("StepLR", step_size=1, gamma=0.5),
            steps=6,
        )
        assert rates == [rate for first in (1.0, 0.25, 0.0625) for rate in [first, first / 2] * 2]

    def test_reduce_on_plateau_is_refused_by_name(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"ReduceLROnPlateau follows a metric.*CosineAnnealingLR"):
            fm.Training(SGD, fm.SchedulerOf("ReduceLROnPlateau")).binding(plain_net())


def muon_on_matrices(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)


OPTIMIZERS: dict[str, Any] = {
    "SGD": fm.OptimizerOf("SGD", lr=0.1),
    "SGD momentum": SGD,
    "SGD nesterov foreach": fm.OptimizerOf("SGD", lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": fm.OptimizerOf("SGD", lr=0.1, momentum=0.9, fused=True),
    "Adam": ADAM,
    "Adam amsgrad": fm.OptimizerOf("Adam", lr=0.01, amsgrad=True),
    "AdamW fused": fm.OptimizerOf("AdamW", lr=0.01, fused=True),
    "AdamW": fm.OptimizerOf("AdamW", lr=0.01, weight_decay=0.1),
    "NAdam": fm.OptimizerOf("NAdam", lr=0.01),
    "RAdam": fm.OptimizerOf("RAdam", lr=0.01),
    "Adamax": fm.OptimizerOf("Adamax", lr=0.01),
    "Adagrad": fm.OptimizerOf("Adagrad", lr=0.05),
    "Adadelta": fm.OptimizerOf("Adadelta", lr=1.0),
    "Adafactor": fm.OptimizerOf("Adafactor", lr=0.05),
    "ASGD": fm.OptimizerOf("ASGD", lr=0.05),
    "RMSprop": fm.OptimizerOf("RMSprop", lr=0.01, momentum=0.9, centered=True),
    "Rprop": fm.OptimizerOf("Rprop", lr=0.01),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = muon_on_matrices


class TestOptimizers:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_any_optimizer_over_segments_and_resumes_is_that_of_a_plain_loop(self, name: str) -> None:
        optimizer = OPTIMIZERS[name]
        assert_same_bits(resumed_bits(noisy_net, optimizer), plain_loop(noisy_net, optimizer, WEIGHTS, 10))

    @pytest.mark.parametrize("policy", ["keep", "average", "reset"])
    @pytest.mark.parametrize("name", ["Adam", "Adafactor", "NAdam", "SGD momentum"])
    def test_every_policy_for_optimizer_state_works_with(self, name: str, policy: Any) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", interval=3, optimizer_state=policy, search="fixed")
        run = fit(algorithm, optimizer=OPTIMIZERS[name], steps=9)
        assert all(tensor.isfinite().all() for tensor in bits(run).values())

    def test_an_optimizer_that_needs_a_closure_is_refused_before_training(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"LBFGS.*closure.*fm\.fork"):
            fit(optimizer=fm.OptimizerOf("LBFGS"))

    def test_an_optimizer_of_other_parameters_is_refused(self) -> None:
        other = plain_net()
        with pytest.raises(fm.ProblemError, match="not the model's"):
            fit(optimizer=lambda model: torch.optim.SGD(other.parameters(), lr=0.1))

    @pytest.mark.parametrize("factory", [0.1, None])
    def test_an_optimizer_that_is_no_function_is_refused(self, factory: Any) -> None:
        with pytest.raises(fm.ProblemError, match="optimizer must be a function of the model"):
            fit(optimizer=factory)

    def test_an_optimizer_instance_is_refused_with_what_to_pass(self) -> None:
        net = plain_net()
        with pytest.raises(fm.ProblemError, match="optimizer must be a function of the model"):
            fit(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * inputs + self.nothing.sum()


class TestModules:
    def test_tied_parameters_are_one_parameter_in_the_row_and_stay_tied(self) -> None:
        net = seeded(tied_net)
        train(net)
        tied = net.body[1]
        assert tied.first.weight is tied.second.weight
        assert_same_bits(resumed_bits(tied_net, ADAM), plain_loop(tied_net, ADAM, WEIGHTS, 10))

    def test_frozen_parameters_are_in_no_row_and_keep_their_memory(self) -> None:
        net = seeded(frozen_net)
        frozen = net.body[0].weight
        address, before = frozen.data_ptr(), frozen.clone()
        state = train(net).state
        trainable = sum(p.numel() for p in net.parameters() if p.requires_grad)
        assert state.rows["float32"].numel() < trainable + 16 * len(list(net.parameters()))
        assert frozen.data_ptr() == address
        assert torch.equal(frozen, before)

    def test_constant_buffers_are_shared_and_changing_ones_belong_to_the_branch(self) -> None:
        assert train(seeded(frozen_net)).state.buffers == {}
        assert set(train(seeded(noisy_net)).state.buffers) == {
            "body.1.running_mean",
            "body.1.running_var",
            "body.1.num_batches_tracked",
        }

    def test_a_buffer_that_two_modules_share_stays_shared(self) -> None:
        def net() -> nn.Module:
            made = noisy_net()
            for head in made.heads.values():
                head.register_buffer("mean", made.body[1].running_mean)
            return made

        module = seeded(net)
        run = fit(net=module)
        assert run.model.heads["tgt"].mean is run.model.body[1].running_mean

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad sets it off
    @pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam", "Adagrad"])
    def test_sparse_gradients_give_the_bits_of_a_plain_loop(self, optimizer: str) -> None:
        def net() -> nn.Module:
            made = Net(Bag(sparse=True))
            if optimizer == "SparseAdam":
                made.heads.requires_grad_(False)
            return made

        make = fm.OptimizerOf(optimizer, lr=0.1)
        assert_same_bits(resumed_bits(net, make), plain_loop(net, make, WEIGHTS, 10))

    def test_sparse_momentum_is_refused_with_what_to_do(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"sparse 'momentum_buffer'.*'body\.table\.weight'.*sparse=False"):
            train(seeded(lambda: Net(Bag(sparse=True))), optimizer=fm.OptimizerOf("SGD", lr=0.1, momentum=0.9))

    def test_scalar_parameters_and_parameters_without_elements_are_fine(self) -> None:
        def net() -> nn.Module:
            made = plain_net()
            made.body.append(_Scaled())
            return made

        assert_same_bits(resumed_bits(net, ADAM), plain_loop(net, ADAM, WEIGHTS, 10))
        assert_same_bits(resumed_bits(net, OPTIMIZERS["NAdam"]), plain_loop(net, OPTIMIZERS["NAdam"], WEIGHTS, 10))

    def test_a_model_without_trainable_parameters_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="no trainable parameter"):
            fm.Training(SGD).binding(plain_net().requires_grad_(False))


def test_a_state_is_independent_of_the_binding_after_release() -> None:
    training = fm.Training(SGD)
    binding = training.binding(seeded(noisy_net))
    state = binding.initial()
    mixture = fm.Mixture("branch", WEIGHTS)
    train_branch(binding, shared_problem(), mixture, state, steps=2, training=training, seed=0)
    binding.release(state)
    held = bits(binding.model)
    for row in state.rows.values():
        row.fill_(torch.nan)
    assert_same_bits(held, binding.model)
    assert binding.model.heads["tgt"].weight.grad is None
