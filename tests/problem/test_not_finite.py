"""The example that holds a number that is not finite is found, whatever holds its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import forkmerge as fm
from forkmerge.problem.not_finite import example_not_finite

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
