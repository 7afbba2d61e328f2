"""IMTL: impartial in losses, in gradients, or in both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forkmerge.methods import IMTL, IMTL_G, IMTL_L
from forkmerge.testing import MethodConformance
from method_steps import assert_first_direction, step, view


def test_imtl_balances_scaled_losses_and_then_gradients() -> None:
    method = IMTL()
    state = {**method.start(view([1.0, 1.0]).setup), "logs": torch.tensor([0.0, 2.0]).double().clamp_min(1.0).log()}
    weights = method.weights(np.eye(2), view([1.0, 3.0]), state)
    np.testing.assert_allclose(weights, [2 / 3, 2 / 3], rtol=1e-12)  # (⅔, ⅓) of the gradients g_1 and 2 g_2
    np.testing.assert_allclose(method.head_weights(weights, view([1.0, 3.0]), state), [1.0, 2.0], rtol=1e-12)
    assert state["logs"][0] == pytest.approx(0.0)  # e^0 · 1 = 1 already
    assert state["logs"][1] == pytest.approx(np.log(2.0) - 0.1)


class TestIMTL_L(MethodConformance):
    method = IMTL_L


class TestIMTL_G(MethodConformance):
    method = IMTL_G


class TestIMTL(MethodConformance):
    method = IMTL


def test_the_first_step_of_the_loss_balance_is_the_sum() -> None:
    assert_first_direction(IMTL_L(), (-1.0, -1.5))


def test_the_gradient_balance_has_equal_projections_on_all_tasks() -> None:
    """On two tasks, where such a direction exists; its weights sum to 1."""
    centres = {"m": (1.0, 0.0), "a": (0.0, 3.0)}
    way = -step(IMTL_G(), centres)[0]
    gradients = -np.array(list(centres.values()))
    projections = gradients @ way / np.linalg.norm(gradients, axis=1)
    np.testing.assert_allclose(projections, projections[0], rtol=1e-9)
    assert np.linalg.solve(gradients.T, way).sum() == pytest.approx(1.0)
