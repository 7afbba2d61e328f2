"""EW: every task counts the same."""

from __future__ import annotations

from forkmerge.methods import EW
from forkmerge.testing import MethodConformance
from method_steps import assert_first_direction


class TestEW(MethodConformance):
    method = EW


def test_a_step_is_the_sum_of_all_gradients() -> None:
    assert_first_direction(EW(), (-1.0, -1.5))
