"""Properties that many tests assert, each under its own name: a failure says what differs and where."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forkmerge.algorithms.run_record import Run
from forkmerge.engine.training.state import State
from forkmerge.testing import same_state

Weights = Run | nn.Module | Mapping[str, Tensor]


def bits(value: Weights) -> dict[str, Tensor]:
    """Every tensor of a model, detached from it."""
    if isinstance(value, Mapping):
        return dict(value)
    model = value.model if isinstance(value, Run) else value
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_bits(left: Weights, right: Weights) -> bool:
    """Equal names in the same order, dtypes, shapes and bytes; NaNs are equal to themselves."""
    one, other = bits(left), bits(right)
    return list(one) == list(other) and all(_same_tensor(one[name], other[name]) for name in one)


def facts(run: Run) -> dict[str, Any]:
    """All that two equal runs share: their JSON without timings, environment and options of the machine."""
    data = copy.deepcopy(run.to_json())
    for key in ("seconds", "environment", "settings", "trained_steps", "verdict"):
        data.pop(key)
    for finished in data["rounds"]:
        finished.pop("seconds")
        if not finished["skipped"]:  # so that runs without any have the checksums that were recorded before it was said
            finished.pop("skipped")
        for branch in finished["branches"].values():
            if branch["lr_scale"] == 1:
                branch.pop("lr_scale")
    return data


def assert_same_bits(left: Weights, right: Weights) -> None:
    """Two models, or two sets of tensors, are the same bit for bit."""
    one, other = bits(left), bits(right)
    assert list(one) == list(other)
    unequal = [name for name in one if not _same_tensor(one[name], other[name])]
    assert not unequal, f"the bits of {', '.join(unequal)} differ"


def assert_other_bits(left: Weights, right: Weights) -> None:
    """Two models of the same names are not the same."""
    assert list(bits(left)) == list(bits(right))
    assert not same_bits(left, right), "the bits are the same"


def assert_same_run(left: Run, right: Run) -> None:
    """Two runs end with the same bits, by the same numbers."""
    assert_same_bits(left, right)
    assert facts(left) == facts(right)


def assert_same_state(left: State, right: State) -> None:
    """Two branches are the same: weights, buffers, optimizer, schedule, the method's own state."""
    assert left.step == right.step
    assert_same_bits(left.rows, right.rows)
    assert_same_bits(left.buffers, right.buffers)
    assert_same_bits(left.optimizer_rows, right.optimizer_rows)
    assert same_state(left, right)


def assert_close(left: Weights, right: Weights, *, rtol: float = 1e-9, atol: float | None = None) -> None:
    """Two models are the same up to rounding."""
    one, other = bits(left), bits(right)
    assert list(one) == list(other)
    for name, tensor in one.items():
        torch.testing.assert_close(
            tensor, other[name], rtol=rtol, atol=rtol if atol is None else atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_permutation_invariant(combine: Callable[[Sequence[int]], Any], count: int, *, rtol: float = 1e-9) -> None:
    """A function of the order in which tasks stand gives the same for every order."""
    first, *orders = permutations(range(count))
    expected = combine(first)
    for order in orders:
        np.testing.assert_allclose(combine(order), expected, rtol=rtol, atol=rtol, err_msg=f"in the order {order}")


def _same_tensor(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*raw)
