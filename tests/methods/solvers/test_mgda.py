"""MGDA: the shortest convex combination against independent solvers, and the truncated original."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forkmerge.methods.solvers import (
    min_norm,
    min_norm_frank_wolfe,
)
from gramians import TASKS, dependent_gradients, make_rng, regular_gradients, shortest_weights


@pytest.mark.parametrize("tasks", TASKS)
def test_min_norm_agrees_with_an_independent_solver(tasks):
    for case in range(100):
        gradients = regular_gradients(make_rng(tasks, case), tasks)
        weights = min_norm(gradients @ gradients.T)
        assert weights.min() >= 0
        np.testing.assert_allclose(weights.sum(), 1, rtol=1e-14)
        np.testing.assert_allclose(weights, shortest_weights(gradients), rtol=0, atol=1e-10)


@pytest.mark.parametrize("tasks", TASKS[1:])
def test_min_norm_of_dependent_gradients_is_optimal_and_gives_the_shortest_vector(tasks):
    for case in range(50):
        gradients = dependent_gradients(make_rng(tasks, case), tasks)
        largest = np.linalg.norm(gradients, axis=1).max()
        direction = min_norm(gradients @ gradients.T) @ gradients / largest
        expected = shortest_weights(gradients) @ gradients / largest
        # Rounding of the Gramian, 1e-16, is what a squared length can be known to.
        np.testing.assert_allclose(direction @ direction, expected @ expected, rtol=1e-10, atol=1e-14)
        assert (gradients @ direction / largest >= direction @ direction - 1e-10).all()
        np.testing.assert_allclose(direction, expected, rtol=0, atol=1e-6)


def test_frank_wolfe_approaches_the_exact_solution_and_stops_where_told():
    for case in range(20):
        gradients = regular_gradients(make_rng(3, case), 3)
        gramian = gradients @ gradients.T
        exact, rough = min_norm(gramian), min_norm_frank_wolfe(gramian)
        assert exact @ gramian @ exact <= rough @ gramian @ rough * (1 + 1e-12)
        np.testing.assert_allclose(rough @ gramian @ rough, exact @ gramian @ exact, rtol=0.02)
        once = min_norm_frank_wolfe(gramian, iterations=1)
        assert (np.sort(once)[:2] <= 1 / 3 + 1e-12).all()


def test_frank_wolfe_is_the_one_of_torchjd():
    aggregation = pytest.importorskip("torchjd.aggregation")
    weighting = aggregation.MGDAWeighting(epsilon=1e-300, max_iters=30)
    for tasks in TASKS[1:]:
        gradients = make_rng(tasks).standard_normal((tasks, 50))
        gramian = gradients @ gradients.T
        weights = min_norm_frank_wolfe(gramian, iterations=30, tolerance=0.0)
        np.testing.assert_allclose(weights, weighting(torch.tensor(gramian, dtype=torch.float64)).numpy(), atol=1e-12)
