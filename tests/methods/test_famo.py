"""FAMO: all losses fall at about the same rate, seen from the losses alone."""

from __future__ import annotations

import numpy as np
import pytest

from forkmerge.methods import FAMO
from forkmerge.testing import MethodConformance
from method_steps import GRADIENTS, assert_first_direction, step


class TestFAMO(MethodConformance):
    method = FAMO


def test_the_direction_of_the_first_step() -> None:
    assert_first_direction(FAMO(), np.array([2.0, 1.0, 1.6]) / 4.6 @ GRADIENTS)  # 1/L over its sum, with L = ½, 1, ⅝


def test_a_task_that_fell_less_than_the_others_gets_more_weight() -> None:
    """After one step that follows the first two tasks, the third has risen."""
    _, own, _ = step(FAMO(), lr=0.1)
    logits = own["logits"].tolist()
    assert logits[2] > max(logits[:2])
    assert abs(logits[2]) == pytest.approx(0.025, rel=1e-3), "Adam's first step has the length of its rate"
