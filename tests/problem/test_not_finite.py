"""The example that holds a number that is not finite is found, whatever holds its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.problem.not_finite import example_not_finite, measure_and_find

HOLDERS: dict[str, Callable[[float], Any]] = {
    "tensor": lambda x: (torch.tensor([0.0, x]), torch.tensor(1)),
    "array": lambda x: (np.array([0.0, x]), 1),
    "scalar of numpy": lambda x: {"x": np.float32(x), "y": np.int64(1)},
    "number": lambda x: [1, "text", {"x": (x,)}],
}


def stream_of(hold: Callable[[float], Any], bad: float) -> fm.Stream:
    data: Any = [hold(bad if index == 5 else 1.0) for index in range(8)]
    return fm.Stream(data, lambda *_: {}, "t", 4)


@pytest.mark.parametrize("holder", HOLDERS)
def test_the_example_is_found_in_the_batches_asked_for(holder: str) -> None:
    for bad in (float("nan"), float("-inf")):
        stream = stream_of(HOLDERS[holder], bad)
        found = [example_not_finite("all", stream, [position], 0) for position in (0, 1)]
        assert sorted(found, key=str) == [5, None]
    assert example_not_finite("all", stream_of(HOLDERS[holder], 2.0), [0, 1], 0) is None


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: (p,), lambda p: {"depth": [p]}])
def test_an_example_without_a_prediction_is_found_and_a_missing_label_is_not(wrap: Callable[[Any], Any]) -> None:
    inputs, depths = torch.ones(8, 3), torch.ones(8, 1)
    depths[2] = torch.nan  # a missing label
    evaluation = fm.Evaluation(
        TensorDataset(inputs, depths), {"n": lambda p, t: 5.0}, lambda m, b: (wrap(m(b[0])), b[1])
    )
    model = nn.Linear(3, 1)
    assert measure_and_find(model, evaluation, 0) == ({"n": 5.0}, None)
    inputs[6, 1] = torch.nan
    assert measure_and_find(model, evaluation, 0) == ({"n": 5.0}, 6)
    model.forward = lambda x: x.nan_to_num()  # type: ignore[method-assign]
    assert measure_and_find(model, evaluation, 0) == ({"n": 5.0}, None)
