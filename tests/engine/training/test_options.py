"""The options of training: what is impossible is refused where it is given."""

from __future__ import annotations

import pytest
import torch

import forkmerge as fm
from problems import SGD, plain_net, shared_problem


def test_the_training_options_are_checked_where_they_are_given() -> None:
    with pytest.raises(fm.ProblemError, match="optimizer must be a function of the model that returns an optimizer"):
        fm.Training(SGD(plain_net()))


def test_an_optimizer_class_in_place_of_a_factory() -> None:
    with pytest.raises(fm.ProblemError, match=r"optimizer is the class Adam.*OptimizerOf\('Adam', lr=…\)"):
        fm.SingleTask().fit(shared_problem(), model=plain_net, optimizer=torch.optim.Adam, steps=1)
