"""What holds for every method of ours: the size of its step, and steps with a single label."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from _asserts import assert_permutation_invariant
from forkmerge.methods import METHODS, LossMethod
from forkmerge.methods.base import adam, pick, spread
from method_steps import CENTRES, by_losses, step, view

SAME_TWICE = {  # what each method makes of two tasks of the same gradient g, in units of g
    "EW": 2.0,
    "UW": 1.0,
    "DWA": 2.0,
    "RLW": 1.0,
    "FAMO": 1.0,
    "IMTL_L": 2.0,
    "MGDA": 1.0,
    "GradNorm": 2.0,
    "PCGrad": 2.0,
    "GradVac": 2.0,
    "IMTL_G": 1.0,
    "IMTL": 1.0,
    "CAGrad": 1.4,
    "NashMTL": np.sqrt(2) / 2.0,  # of length √2, and ‖g‖ = 2
    "GCS": 2.0,
    "OL_AUX": 2.0,
    "ARML": 2.0,
    "AutoLambda": 0.2002,
    "AuxiNash": np.sqrt(2) / 2.0,
    "TargetAwarePCGrad": 2.0,
    "TargetAwareGradVac": 2.0,
}


@pytest.mark.parametrize("name", METHODS)
def test_two_tasks_of_one_gradient(name: str) -> None:
    theta, _, _ = step(METHODS[name](), {"m": (2.0, 0.0), "a": (2.0, 0.0)})
    np.testing.assert_allclose(theta, [2.0 * SAME_TWICE[name], 0.0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_a_single_present_task_is_trained_on(name: str) -> None:
    """One task's label in the first step: the direction is a positive multiple of its gradient, or nothing."""
    method = METHODS[name]()
    state = method.start(view([1.0] * 3).setup)
    seen = view([2.0], present=[1], tasks=3)
    if isinstance(method, LossMethod):
        weights = by_losses(method, seen, state)
    else:
        weights = method.weights(np.array([[4.0]]), seen, state)
    assert weights.shape == (1,)
    assert weights[0] > 0 or name == "GCS"  # without the target's gradient nothing agrees with it


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("RLW", "PCGrad", "GradVac")])  # they draw
def test_the_first_step_does_not_depend_on_the_order_of_tasks(name: str) -> None:
    method = METHODS[name]()
    fixed = ["m"] if method.needs_target else []
    tasks = [task for task in CENTRES if task not in fixed]

    def way(order: Sequence[int]) -> np.ndarray:
        return step(method, {task: CENTRES[task] for task in (*fixed, *(tasks[i] for i in order))})[0]

    assert_permutation_invariant(way, len(tasks))


class TestAdam:
    def test_it_is_torchs_own(self) -> None:
        state = {"values": torch.tensor([1.0, -2.0], dtype=torch.float64)}
        parameter = nn.Parameter(state["values"].clone())
        theirs = torch.optim.Adam([parameter], lr=0.1, weight_decay=0.01)
        for gradient in ([1.0, 0.5], [-3.0, 2.0], [0.0, 1.0]):
            parameter.grad = torch.tensor(gradient, dtype=torch.float64)
            theirs.step()
            adam(state, "values", parameter.grad, 0.1, weight_decay=0.01)
        torch.testing.assert_close(state["values"], parameter.detach(), rtol=1e-12, atol=0)

    def test_an_entry_without_a_gradient_stays_as_if_the_step_had_not_been(self) -> None:
        state, twin = ({"values": torch.ones(1, dtype=torch.float64)} for _ in range(2))
        state["values"] = state["values"].repeat(2)
        for gradient in (1.0, math.nan, -2.0):
            adam(state, "values", torch.tensor([gradient, 1.0], dtype=torch.float64), 0.1)
            if not math.isnan(gradient):
                adam(twin, "values", torch.tensor([gradient], dtype=torch.float64), 0.1)
        assert state["values"][0] == twin["values"][0]


def test_values_are_picked_for_the_tasks_present_and_spread_over_all() -> None:
    seen = view([5.0, 6.0], present=[0, 2], tasks=3)
    assert pick(torch.tensor([1.0, 2.0, 3.0]), seen).tolist() == [1.0, 3.0]
    np.testing.assert_array_equal(spread(torch.tensor([5.0, 6.0]), seen), [5.0, math.nan, 6.0])


def test_the_target_is_found_among_the_tasks_that_are_present() -> None:
    assert view([1.0, 1.0], present=[0, 2], tasks=3).target == 0
    assert view([1.0, 1.0], present=[1, 2], tasks=3).target is None
