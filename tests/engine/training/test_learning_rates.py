"""What a branch multiplies the schedule's learning rates by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forkmerge as fm
from _asserts import assert_close, assert_other_bits, assert_same_bits
from forkmerge.engine.training.learning_rates import Anneal, ScaledSteps, rates_times
from naive_branches import naive_branches
from problems import ADAM, SGD, fit, noisy_net, plain_net

JOINT = {"tgt": 1.0, "aux": 1.0, "odd": 1.0}


def made(lr: Any = 0.1) -> torch.optim.Optimizer:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))
    return torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 2 * lr}], lr=lr)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class TestRates:
    def test_every_group_is_multiplied_inside_and_only_there(self) -> None:
        optimizer = made()
        with rates_times(optimizer, 3.0):
            assert rates(optimizer) == pytest.approx([0.3, 0.6])
        assert rates(optimizer) == [0.1, 0.2]

    def test_an_error_inside_leaves_the_rates_as_they_were(self) -> None:
        optimizer = made()
        with pytest.raises(RuntimeError), rates_times(optimizer, 3.0):
            raise RuntimeError
        assert rates(optimizer) == [0.1, 0.2]

    def test_a_rate_that_is_a_tensor_is_not_written_to(self) -> None:
        lr = torch.tensor(0.1)
        optimizer = made(lr)
        with rates_times(optimizer, 3.0):
            assert rates(optimizer) == pytest.approx([0.3, 0.6])
        assert optimizer.param_groups[0]["lr"] is lr
        assert float(lr) == pytest.approx(0.1)

    def test_a_factor_of_one_touches_nothing(self) -> None:
        optimizer = made(lr := torch.tensor(0.1))
        with rates_times(optimizer, 1.0):
            assert optimizer.param_groups[0]["lr"] is lr

    def test_groups_without_a_rate_are_refused(self) -> None:
        optimizer = made()
        del optimizer.param_groups[1]["lr"]
        with (
            pytest.raises(fm.ProblemError, match="SGD has parameter groups without a learning rate"),
            rates_times(optimizer, 3.0),
        ):
            pass

    def test_a_fall_goes_from_one_to_just_above_zero(self) -> None:
        assert [Anneal(4, 8).factor(step) for step in range(4, 8)] == [1.0, 0.75, 0.5, 0.25]


class TestScaledSteps:
    def test_the_rate_of_a_step_is_multiplied_and_the_schedule_goes_on_from_its_own(self) -> None:
        optimizer = made()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        ScaledSteps(optimizer, 3.0)
        (first,) = optimizer.param_groups[0]["params"]
        for expected in (1 - 0.3, 1 - 0.3 - 0.15):
            first.grad = torch.ones_like(first)
            optimizer.step()
            schedule.step()
            assert first.tolist() == pytest.approx([expected] * 2)
        assert rates(optimizer) == pytest.approx([0.025, 0.05])

    def test_a_step_that_fails_does_not_multiply_the_next_one_twice(self) -> None:
        optimizer = made()
        ScaledSteps(optimizer, 3.0)

        def fail() -> float:
            raise RuntimeError

        with pytest.raises(RuntimeError):
            optimizer.step(fail)
        (first,) = optimizer.param_groups[0]["params"]
        first.grad = torch.ones_like(first)
        optimizer.step()
        assert first.tolist() == pytest.approx([0.7] * 2)
        assert rates(optimizer) == [0.1, 0.2]


class TestBranches:
    """`Mixture(lr_scale=3)` in whole runs."""

    @pytest.mark.parametrize("scheduler", [None, fm.SchedulerOf("ExponentialLR", gamma=0.9)])
    @pytest.mark.parametrize("optimizer", [SGD, fm.OptimizerOf("AdamW", lr=1e-3)], ids=["SGD", "AdamW"])
    def test_a_branch_at_three_times_the_rate_is_a_run_at_that_rate(self, optimizer: Any, scheduler: Any) -> None:
        faster = fm.OptimizerOf(optimizer.kind, **{**optimizer.options, "lr": 3 * optimizer.options["lr"]})
        algorithm = fm.ForkMerge([fm.Mixture("fast", JOINT, 3)], interval=12, search="fixed")
        branch = fit(algorithm, net=noisy_net, optimizer=optimizer, scheduler=scheduler)
        plain = fit(fm.Joint(JOINT), net=noisy_net, optimizer=faster, scheduler=scheduler)
        assert_close(branch, plain, rtol=1e-5, atol=1e-6)
        assert_other_bits(branch, fit(fm.Joint(JOINT), net=noisy_net, optimizer=optimizer, scheduler=scheduler))

    def test_a_factor_of_one_is_no_factor_to_the_bit(self) -> None:
        plain, scaled = fm.Mixture("joint", JOINT), fm.Mixture("joint", JOINT, lr_scale=1)
        runs = [fit(fm.ForkMerge([fm.Mixture("alone", {"tgt": 1.0}), m], interval=4)) for m in (plain, scaled)]
        assert_same_bits(*runs)

    @pytest.mark.parametrize("net", [plain_net, noisy_net])
    def test_rounds_of_four_branches_are_those_of_a_plain_loop(self, net: Any) -> None:
        shares = {"alone": 0.25, "joint": 0.25, "alone ×3": 0.5, "joint ×3": 0.0}
        branches = {
            "alone": ({"tgt": 1.0}, 1.0),
            "joint": (JOINT, 1.0),
            "alone ×3": ({"tgt": 1.0}, 3.0),
            "joint ×3": (JOINT, 3.0),
        }
        cosine, slow = fm.SchedulerOf("CosineAnnealingLR", T_max=12), fm.OptimizerOf("SGD", lr=0.03, momentum=0.9)
        algorithm = fm.ForkMerge("rates", interval=5, search=fm.Fixed(tuple(shares.values())))
        run = fit(algorithm, net=net, steps=12, scheduler=cosine, optimizer=slow)
        assert list(run.rounds[0].branches) == list(branches)
        twin = naive_branches(net, slow, branches, [shares] * 3, steps=12, interval=5, scheduler=cosine)
        assert_close(run, twin, rtol=1e-4, atol=1e-5)

    def test_records_and_relevance_say_the_factor(self) -> None:
        run = fit(fm.ForkMerge("rates", interval=6, search=fm.Fixed((0.0, 0.5, 0.0, 0.5))))
        assert {name: b.lr_scale for name, b in run.rounds[0].branches.items()} == {
            "alone": 1.0,
            "joint": 1.0,
            "alone ×3": 3.0,
            "joint ×3": 3.0,
        }
        assert run.relevance == {"tgt": 2.0, "aux": 2.0, "odd": 2.0}

    def test_methods_see_the_branchs_own_rate(self) -> None:
        seen: list[float] = []

        class Watch(fm.methods.EW):
            def before_step(self, context: Any, state: Any) -> None:
                seen.append(context.lr)

        fit(fm.ForkMerge([fm.Mixture("fast", JOINT, 3)], method=Watch(), search="fixed"), steps=1, optimizer=ADAM)
        assert seen == pytest.approx([0.03])
