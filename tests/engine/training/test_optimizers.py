"""Factories of optimizers and schedulers: names and options that do not exist, groups, shares of steps."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import forkmerge as fm
from problems import SGD


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
