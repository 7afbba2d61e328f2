"""The options of training: what is impossible is refused where it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forkmerge as fm
from _asserts import same_bits
from problems import SGD, fit, plain_net, shared_problem


def test_the_training_options_are_checked_where_they_are_given() -> None:
    with pytest.raises(fm.ProblemError, match="optimizer must be a function of the model that returns an optimizer"):
        fm.Training(SGD(plain_net()))


def test_an_optimizer_class_in_place_of_a_factory() -> None:
    with pytest.raises(fm.ProblemError, match=r"optimizer is the class Adam.*OptimizerOf\('Adam', lr=…\)"):
        fm.SingleTask().fit(shared_problem(), model=plain_net, optimizer=torch.optim.Adam, steps=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "float8"}, "precision must be float32, bfloat16 or float16, got 'float8'"),
        ({"accumulate": 0}, "accumulate must be a positive integer, got 0"),
        ({"clip_norm": -1.0}, r"clip_norm must be a positive number, or None, got -1\.0"),
        ({"clip_norm": float("nan")}, "clip_norm must be a positive number, or None, got nan"),
        ({"loader_workers": -1}, "loader_workers must be an integer ≥ 0, got -1"),
        ({"statistics": "mine"}, "statistics must be 'all' or 'target', got 'mine'"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        fm.Training(SGD, **options)


def test_a_methods_learning_rate_is_that_of_the_parameters_named() -> None:
    optimizer = fm.OptimizerOf("SGD", lr=0.4, group_lr={"body": 0.25})
    assert fm.Training(optimizer).binding(plain_net()).lr == 0.1
    assert fm.Training(optimizer, lr_of="heads.aux").binding(plain_net()).lr == 0.4
    with pytest.raises(fm.ProblemError, match="lr_of: no trained parameter's name starts with 'neck': body, heads do"):
        fm.Training(optimizer, lr_of="neck").binding(plain_net())


def test_whose_learning_rate_a_method_takes_is_said_where_groups_differ() -> None:
    optimizer = fm.OptimizerOf("SGD", lr=0.4, group_lr={"body": 0.25})
    said = fit(fm.Joint(method="UW"), optimizer=optimizer)
    assert any("first parameter group, 0.1 (others have 0.4): lr_of=" in note for note in said.notes)
    named = fit(fm.Joint(method="UW"), optimizer=optimizer, lr_of="heads")
    assert not named.notes
    assert not same_bits(said, named)
    assert not fit(fm.Joint(method="UW")).notes
    assert not fit(fm.Joint(), optimizer=optimizer).notes
