"""AuxiNash: a bargain whose powers follow the target's loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import forkmerge as fm
from forkmerge.methods import AuxiNash, Method, NashMTL
from forkmerge.testing import MethodConformance, train_small
from method_steps import step, view


class TestOftenMovedAuxiNash(MethodConformance):
    def make(self) -> Method:
        return AuxiNash(every=2, max_norm=1.0)


def test_auxinash_weighs_by_power() -> None:
    method = AuxiNash()
    state = {**method.start(view([1.0, 1.0]).setup), "powers": [1.5, 0.5]}
    weights = method.weights(np.diag([4.0, 0.25]), view([1.0, 1.0]), state)
    np.testing.assert_allclose(weights, np.sqrt([1.5 / 4.0, 0.5 / 0.25]), rtol=1e-12)


def test_auxinash_moves_powers_down_the_targets_loss() -> None:
    """Its slope is that of L_m(θ − α Σ a_k(p) g_k)/α, seen by finite differences."""
    from forkmerge.methods.solvers import nash

    centres = {"m": (1.0, 0.0), "a": (1.0, 1.0)}
    _, own, _ = step(AuxiNash(every=1, momentum=0.0), centres, lr=1e-9)
    gradients = -np.array(list(centres.values()))
    slopes = []
    for k in range(2):
        ends = [nash(gradients @ gradients.T, np.ones(2) + sign * 1e-6 * np.eye(2)[k]) for sign in (1, -1)]
        ways = [1e-6 * -(a @ gradients) for a in ends]
        losses = [0.5 * np.square(way - [1.0, 0.0]).sum() for way in ways]
        slopes.append((losses[0] - losses[1]) / 2e-6 / 1e-6)
    np.testing.assert_allclose(own["velocity"], slopes, rtol=1e-3)
    moved = np.ones(2) - 5e-3 * np.array(own["velocity"])
    np.testing.assert_allclose(own["powers"], moved * 2 / moved.sum(), rtol=1e-9)


def test_auxinash_without_learning_is_nash() -> None:
    one, other = (train_small(method).state for method in (NashMTL(), AuxiNash(lr=0.0, every=1)))
    torch.testing.assert_close(one.rows["float32"], other.rows["float32"])


class TestAuxiNash(MethodConformance):
    method = AuxiNash


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"look_at": "test"}, "look_at must be second or validation, got 'test'"),
        ({"every": 0}, "every must be a positive integer, got 0"),
    ],
)
def test_wrong_options_are_refused_when_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        AuxiNash(**options)
