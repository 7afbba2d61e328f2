"""MGDA: the shortest convex combination against independent solvers, and the truncated original."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forkmerge.methods.solvers import min_norm, min_norm_frank_wolfe
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


def _frank_wolfe(gradients: np.ndarray, iterations: int, tolerance: float) -> np.ndarray:
    """Algorithm 2 of Sener and Koltun on the gradients themselves: the line search is one projection."""
    weights = np.full(len(gradients), 1 / len(gradients))
    for _ in range(iterations):
        current = weights @ gradients
        chosen = int((gradients @ current).argmin())
        difference = gradients[chosen] - current
        step = np.clip(-(current @ difference) / (difference @ difference), 0, 1) if difference.any() else 1.0
        following = (1 - step) * weights + step * np.eye(len(gradients))[chosen]
        moved = np.abs(following - weights).sum()
        weights = following
        if moved <= tolerance:
            break
    return weights


def test_frank_wolfe_takes_the_steps_of_its_paper_until_one_is_as_small_as_told():
    ends = set()
    for case in range(60):
        rng = make_rng(4, case)
        gradients = rng.standard_normal((4, 6)) * 10 ** rng.uniform(-0.5, 0.5, (4, 1))
        for iterations, tolerance in [(1, 0.0), (7, 0.0), (500, 0.3), (500, 0.1), (500, 0.03), (500, 0.01)]:
            expected = _frank_wolfe(gradients, iterations, tolerance)
            weights = min_norm_frank_wolfe(gradients @ gradients.T, iterations, tolerance)
            np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-9)
            ends.add(tuple(expected.round(6)))
    assert len(ends) > 200  # the limits do end the iteration at different weights


def test_frank_wolfe_by_default_takes_the_steps_and_the_tolerance_of_the_authors():
    differences = np.zeros(2)
    for case in range(20):
        gradients = make_rng(3, case).standard_normal((5, 9))
        gramian = gradients @ gradients.T
        weights = min_norm_frank_wolfe(gramian)
        np.testing.assert_array_equal(weights, min_norm_frank_wolfe(gramian, 250, 1e-5))
        differences += [
            np.abs(weights - min_norm_frank_wolfe(gramian, 251, 1e-5)).sum(),
            np.abs(weights - min_norm_frank_wolfe(gramian, 250, 2e-5)).sum(),
        ]
    assert (differences > 0).all()


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
