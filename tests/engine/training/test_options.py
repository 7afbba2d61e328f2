"""The options of training: what is impossible is refused where it is given."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "float8"}, "precision must be float32, bfloat16 or float16, got 'float8'"),
        ({"accumulate": 0}, "accumulate must be a positive integer, got 0"),
        ({"clip_norm": -1.0}, r"clip_norm must be positive, got -1\.0"),
        ({"clip_norm": float("nan")}, "clip_norm must be positive, got nan"),
        ({"loader_workers": -1}, "loader_workers must be an integer ≥ 0, got -1"),
        ({"statistics": "mine"}, "statistics must be 'all' or 'target', got 'mine'"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        fm.Training(SGD, **options)
