"""GradNorm: weights that bring gradients to a common size."""

from __future__ import annotations

import numpy as np

from forkmerge.methods import GradNorm
from forkmerge.testing import MethodConformance
from method_steps import assert_first_direction, step, view


def test_gradnorm_moves_weights_towards_a_common_size_and_keeps_their_sum() -> None:
    _, own, _ = step(GradNorm())
    moved = np.array([1.025, 0.975, 1.025])  # norms 1, √2 and √1.25 around their mean
    np.testing.assert_allclose(own["weights"], moved * 3 / moved.sum(), rtol=1e-6)
    assert own["first"] == [0.5, 1.0, 0.625]


def test_gradnorm_asks_slow_tasks_for_larger_gradients() -> None:
    method = GradNorm(alpha=1.0, lr=0.1)
    state = {**method.start(view([1.0, 1.0]).setup), "first": [1.0, 1.0]}
    # Rates 0.5 and 1.5 of a mean of 1: goals ½ and 3/2 for gradients of size 1.
    method.weights(np.eye(2), view([0.5, 1.5]), state)
    np.testing.assert_allclose(state["weights"], [0.9, 1.1], rtol=1e-6)


class TestGradNorm(MethodConformance):
    method = GradNorm


def test_the_first_step_is_the_sum() -> None:
    assert_first_direction(GradNorm(), (-1.0, -1.5))
