"""Factories of optimizers and schedulers: names and options that do not exist, groups, shares of steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forkmerge as fm
from _asserts import assert_same_bits
from branch_training import WEIGHTS, resumed_bits
from forkmerge.engine.training.optimizers import state_share
from problems import SGD, plain_loop, plain_net


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fm.OptimizerOf("Adm", lr=1), r"unknown optimizer 'Adm'\. Did you mean 'Adam'"),
        (lambda: fm.SchedulerOf("CosineLR"), "unknown scheduler 'CosineLR'"),
    ],
)
def test_a_factory_of_an_unknown_name_offers_the_closest(make: Any, message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        make()


def test_a_share_of_steps_needs_steps_to_be_a_share_of() -> None:
    factory = fm.SchedulerOf("CosineAnnealingLR", T_max="100%")
    with pytest.raises(fm.ProblemError, match=r"T_max is a share of the run's steps; say of how many with over"):
        factory(SGD(nn.Linear(1, 1)))
    assert factory.over(30)(SGD(nn.Linear(1, 1))).T_max == 30


def test_a_misspelt_optimizer_option_offers_the_closest() -> None:
    with pytest.raises(fm.ProblemError, match=r"unknown option of Adam 'lrr'\. Did you mean 'lr'"):
        fm.OptimizerOf("Adam", lrr=1)


def test_parameter_groups_keep_their_own_learning_rates() -> None:
    groups = fm.OptimizerOf("SGD", lr=0.1, momentum=0.9, group_lr={"body": 0.1, "heads.aux": 0.0})

    def by_hand(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        pick = [
            {"params": [p for n, p in named.items() if n.startswith("body")], "lr": 0.1 * 0.1},
            {"params": [p for n, p in named.items() if n.startswith("heads.aux")], "lr": 0.0},
            {"params": [p for n, p in named.items() if n.startswith(("heads.tgt", "heads.odd"))]},
        ]
        return torch.optim.SGD(pick, lr=0.1, momentum=0.9)

    cosine = fm.SchedulerOf("CosineAnnealingLR", T_max=10)
    ours = resumed_bits(plain_net, groups, cosine)
    assert_same_bits(ours, plain_loop(plain_net, by_hand, WEIGHTS, 10, scheduler=cosine))


@pytest.mark.parametrize(("name", "share"), [("SGD", 0.0), ("Adam", 2.0), ("Adagrad", 1.0), ("LBFGS", 2.0)])
def test_what_an_optimizer_will_keep_is_known_before_its_first_step(name: str, share: float) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = fm.OptimizerOf(name, lr=0.1)(model)
    assert state_share(optimizer) == share


def test_a_scheduler_may_move_once_per_epoch_as_one_called_by_hand_does() -> None:
    model = nn.Linear(1, 1)
    ours, by_hand = SGD(model), SGD(model)
    factory = fm.SchedulerOf("CosineAnnealingLR", every="25%", T_max=4)
    per_epoch = factory.over(12)(ours)
    assert repr(factory.over(12)) == "CosineAnnealingLR(T_max=4) every 3 steps"
    plain = torch.optim.lr_scheduler.CosineAnnealingLR(by_hand, T_max=4)
    for _epoch in range(4):
        for _step in range(3):
            assert ours.param_groups[0]["lr"] == by_hand.param_groups[0]["lr"]
            ours.step()
            per_epoch.step()
        by_hand.step()
        plain.step()
    assert per_epoch.get_last_lr() == [ours.param_groups[0]["lr"]] == [by_hand.param_groups[0]["lr"]]


def test_a_scheduler_that_moves_once_per_epoch_resumes_to_the_same_bits() -> None:
    cosine = fm.SchedulerOf("CosineAnnealingLR", every=3, T_max=4)
    assert_same_bits(resumed_bits(plain_net, SGD, cosine), plain_loop(plain_net, SGD, WEIGHTS, 10, scheduler=cosine))


@pytest.mark.parametrize("every", [0, -1, 2.5, "often", True])
def test_a_scheduler_cannot_move_every_so_often(every: Any) -> None:
    with pytest.raises(fm.ProblemError, match="a scheduler moves every so many steps, such as 2500 or '5%'"):
        fm.SchedulerOf("CosineAnnealingLR", every=every, T_max=4)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (fm.OptimizerOf("SGD", lr="x"), r"SGD\(lr='x'\) cannot be made: lr must be a number, got 'x'"),
        (fm.OptimizerOf("Adam", weight_decay="y"), "weight_decay must be a number, got 'y'"),
        (fm.OptimizerOf("SGD", lr=float("nan")), "lr must be finite"),
        (fm.OptimizerOf("SGD", lr=-1), "Invalid learning rate: -1"),
    ],
)
def test_text_in_the_place_of_a_number_is_named(factory: Any, message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        factory(torch.nn.Linear(2, 1))
