"""IMTL-G: equal projections against the closed form of its paper, and where none are equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forkmerge.methods.solvers import imtl_g
from gramians import TASKS, make_rng, regular_gradients


@pytest.mark.parametrize("tasks", TASKS)
def test_imtl_g_agrees_with_the_formula_of_its_paper(tasks):
    compared = 0
    for case in range(100):
        gradients = regular_gradients(make_rng(tasks, case), tasks)
        unit = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
        differences, directions = gradients[0] - gradients[1:], unit[0] - unit[1:]
        others = np.linalg.solve(directions @ differences.T, directions @ gradients[0])
        expected = np.append(1 - others.sum(), others)
        if np.linalg.cond(unit) > 100 or np.abs(expected).max() > 100:
            continue
        compared += 1
        np.testing.assert_allclose(imtl_g(gradients @ gradients.T), expected, rtol=0, atol=1e-10)
    assert compared > 80


def test_imtl_g_of_dependent_gradients_keeps_equal_projections_where_they_exist():
    gradients = np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]])
    weights = imtl_g(gradients @ gradients.T)
    np.testing.assert_allclose(weights.sum(), 1)
    projections = gradients @ (weights @ gradients) / np.linalg.norm(gradients, axis=1)
    np.testing.assert_allclose(projections, projections[0])


def _signed(vector: np.ndarray, like: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector) * np.sign(vector @ like)


def test_imtl_g_of_more_tasks_than_dimensions_is_the_least_squares_compromise():
    for case in range(20):
        gradients = make_rng(case).standard_normal((4, 2))
        unit = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
        expected = np.linalg.lstsq(unit, np.ones(4), rcond=None)[0]  # the d with unit·d nearest to 1
        direction = imtl_g(gradients @ gradients.T) @ gradients
        np.testing.assert_allclose(direction / np.linalg.norm(direction), _signed(expected, direction), atol=1e-9)


def test_imtl_g_whose_weights_cannot_sum_to_one_keeps_its_direction():
    cosines = np.array([[1.0, 0.9, 0.9], [0.9, 1.0, 0.65], [0.9, 0.65, 1.0]])
    inverse = np.linalg.solve(cosines, np.ones(3))
    assert inverse[0] < 0 < inverse[1]
    norms = np.array([-inverse[0] / (inverse[1] + inverse[2]), 1.0, 1.0])  # so that C⁻¹1/‖g‖ sums to zero
    weights = imtl_g(cosines * norms * norms[:, None])
    np.testing.assert_allclose(np.abs(weights).sum(), 1)
    projections = cosines @ (weights * norms)
    np.testing.assert_allclose(projections, projections[0])
    assert projections[0] > 0


def test_imtl_g_of_unit_gradients_that_add_up_to_zero_gives_zero_by_the_inverse_norms():
    corners = np.array([[1.0, 0.0], [-0.5, np.sqrt(0.75)], [-0.5, -np.sqrt(0.75)]])
    for unit in (np.array([[1.0, 0.0], [-1.0, 0.0]]), corners):
        norms = np.arange(1.0, len(unit) + 1)
        gradients = unit * norms[:, None]
        weights = imtl_g(gradients @ gradients.T)
        np.testing.assert_allclose(weights, 1 / norms / (1 / norms).sum(), rtol=1e-9)
        np.testing.assert_allclose(weights @ gradients, 0, atol=1e-9)


def test_imtl_g_is_the_one_of_torchjd():
    aggregation = pytest.importorskip("torchjd.aggregation")
    for case in range(20):
        gradients = make_rng(case).standard_normal((4, 9))
        gramian = gradients @ gradients.T
        expected = aggregation.IMTLGWeighting()(torch.tensor(gramian, dtype=torch.float64)).numpy()
        np.testing.assert_allclose(imtl_g(gramian), expected, rtol=1e-9)
