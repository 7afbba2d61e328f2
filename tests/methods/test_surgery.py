"""PCGrad and GradVac, among all tasks or towards the target only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forkmerge.methods import GradVac, Method, PCGrad, TargetAwareGradVac, TargetAwarePCGrad
from forkmerge.testing import MethodConformance, train_small
from method_steps import assert_first_direction, step, view


def test_pcgrad_on_two_tasks() -> None:
    theta, _, _ = step(PCGrad(), {"m": (1.0, 0.0), "b": (-1.0, 2.0)})
    # g_m = (−1, 0) and g_b = (1, −2): each loses its part along the other.
    np.testing.assert_allclose(-theta, [-1 + 1 / 5 + 0.0, -2 / 5 - 2.0], rtol=1e-12)


def test_gradvac_aims_at_the_cosines_it_has_seen() -> None:
    method = GradVac(beta=1.0)
    state = method.start(view([1.0, 1.0]).setup)
    method.weights(np.array([[1.0, 0.6], [0.6, 1.0]]), view([1.0, 1.0]), state)
    assert state["goals"][0][1] == pytest.approx(0.6)
    weights = method.weights(np.eye(2), view([1.0, 1.0], 1), state)
    # Orthogonal gradients are turned until their cosine with the other's original is 0.6: +¾ of the other.
    np.testing.assert_allclose(weights, [1.75, 1.75], rtol=1e-12)


def test_gradvac_without_goals_is_pcgrad() -> None:
    """In the first step; the corrections are the same, in the same order."""
    one, other = (train_small(method, cuts=(0, 1)).state for method in (PCGrad(), GradVac()))
    torch.testing.assert_close(one.rows["float32"], other.rows["float32"])


class TestPCGrad(MethodConformance):
    method = PCGrad


class TestGradVac(MethodConformance):
    method = GradVac


class TestTargetAwarePCGrad(MethodConformance):
    method = TargetAwarePCGrad


class TestTargetAwareGradVac(MethodConformance):
    method = TargetAwareGradVac


@pytest.mark.parametrize("method", [TargetAwarePCGrad(), TargetAwareGradVac()])
def test_towards_the_target_g_b_loses_its_part_along_g_m_and_nothing_else_changes(method: Method) -> None:
    assert_first_direction(method, (-2.0, -1.5))


@pytest.mark.parametrize("kind", [GradVac, TargetAwareGradVac])
def test_goals_of_the_authors_scripts_follow_half_way(kind: type[GradVac | TargetAwareGradVac]) -> None:
    method = kind.authors_scripts()
    state = method.start(view([1.0, 1.0]).setup)
    for at, goal in enumerate((0.3, 0.45, 0.525)):
        method.weights(np.array([[1.0, 0.6], [0.6, 1.0]]), view([1.0, 1.0], at), state)
        assert state["goals"][1][0] == pytest.approx(goal)
