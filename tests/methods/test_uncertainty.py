"""UW: losses weighted by learnt uncertainties."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forkmerge.methods import UW
from forkmerge.testing import MethodConformance
from method_steps import assert_first_direction, by_losses, view


class TestUW(MethodConformance):
    method = UW


def test_the_direction_of_the_first_step() -> None:
    assert_first_direction(UW(), (-0.5, -0.75))  # half of the sum: variances of 1


def test_variances_follow_the_losses() -> None:
    """s moves up where ½ e^(−s) L is above ½, and down where it is below."""
    method = UW(lr=0.1)
    state = method.start(view([1.0] * 3).setup)
    by_losses(method, view([3.0, 1.0, 0.5]), state)
    assert state["logs"].tolist() == pytest.approx([0.1, 0.0, -0.1])
    weights = by_losses(method, view([3.0, 1.0, 0.5], 1), state)
    assert weights.tolist() == pytest.approx((0.5 * np.exp([-0.1, 0.0, 0.1])).tolist())


def test_the_authors_scripts_start_from_minus_a_half() -> None:
    """Weights ½ e^½; s then moves along ½ (1 − e^½ L)."""
    method = UW.authors_scripts()
    state = method.start(view([1.0] * 3).setup)
    losses = [3.0, 0.1, math.exp(-0.5)]
    assert by_losses(method, view(losses), state).tolist() == pytest.approx([0.5 * math.exp(0.5)] * 3)
    assert state["logs"].tolist() == pytest.approx([-0.4, -0.6, -0.5]), "Adam's first step at the model's rate of 0.1"
    assert UW().initial == 0.0
