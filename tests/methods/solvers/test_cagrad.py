"""CAGrad: the direction in the ball against an independent solver, and where its dual is silent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, root

from forkmerge.methods.solvers import _cagrad, cagrad
from gramians import TASKS, count_calls, dependent_gradients, make_rng, regular_gradients, shortest_weights

RADIUS = 0.4


def _cagrad_dual(gradients: np.ndarray, c: float) -> tuple[np.ndarray, float]:
    """CAGrad's simplex weights and the least slack outside their support: scipy's SLSQP, polished by a root finder."""
    scaled = gradients / np.linalg.norm(gradients, axis=1).mean()
    products = scaled @ scaled.T
    slopes = products.mean(axis=1)
    radius = c * np.sqrt(slopes.mean())
    tasks = len(scaled)

    def objective(w: np.ndarray) -> float:
        return float(w @ slopes + radius * np.sqrt(w @ products @ w))

    def slope(w: np.ndarray) -> np.ndarray:
        return slopes + radius * products @ w / np.sqrt(w @ products @ w)

    rough = minimize(
        objective,
        np.full(tasks, 1 / tasks),
        jac=slope,
        bounds=[(0, 1)] * tasks,
        constraints=[{"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like}],
        method="SLSQP",
        options={"ftol": 1e-9, "maxiter": 500},
    ).x
    support = np.flatnonzero(rough > 1e-5)

    def conditions(unknown: np.ndarray) -> np.ndarray:
        w = np.zeros(tasks)
        w[support] = unknown[:-1]
        return np.append(slope(w)[support] - unknown[-1], w.sum() - 1)

    def jacobian(unknown: np.ndarray) -> np.ndarray:
        inside = products[np.ix_(support, support)]
        along = inside @ unknown[:-1]
        length = np.sqrt(unknown[:-1] @ along)
        matrix = np.zeros((len(unknown), len(unknown)))
        matrix[:-1, :-1] = radius * (inside / length - np.outer(along, along) / length**3)
        matrix[:-1, -1], matrix[-1, :-1] = -1, 1
        return matrix

    start = np.append(rough[support] / rough[support].sum(), slope(rough)[support].mean())
    optimum = root(conditions, start, jac=jacobian, tol=1e-15).x
    w = np.zeros(tasks)
    w[support] = optimum[:-1]
    outside = np.delete(slope(w), support) - optimum[-1]
    return w, min([*outside, *optimum[:-1]])


def _cagrad_weights(gradients: np.ndarray, c: float, w: np.ndarray) -> np.ndarray:
    average = np.linalg.norm(gradients.mean(axis=0))
    return 1 / len(w) + c * average / np.linalg.norm(w @ gradients) * w


def assert_same_contributions(weights: np.ndarray, expected: np.ndarray, gradients: np.ndarray) -> None:
    """Compare to 1e-10 what each task brings into the direction."""
    norms = np.linalg.norm(gradients, axis=1)
    np.testing.assert_allclose(weights * norms, expected * norms, rtol=0, atol=1e-10 * np.abs(expected * norms).max())


@pytest.mark.parametrize("tasks", TASKS)
def test_cagrad_agrees_with_an_independent_solver(tasks):
    compared = 0
    for case in range(100):
        gradients = regular_gradients(make_rng(tasks, case), tasks)
        w, margin = _cagrad_dual(gradients, RADIUS)
        if margin < 1e-6:  # a face is decided by the last digits, or the root finder left the simplex
            continue
        compared += 1
        weights = cagrad(gradients @ gradients.T, RADIUS)
        assert_same_contributions(weights, _cagrad_weights(gradients, RADIUS, w), gradients)
    assert compared > 80


@pytest.mark.parametrize("c", [0.1, 0.4, 1.0, 2.0])
@pytest.mark.parametrize("tasks", TASKS[1:])
def test_cagrad_of_dependent_gradients_reaches_the_bound_of_its_dual(tasks, c):
    for case in range(25):
        gradients = dependent_gradients(make_rng(tasks, case), tasks)
        gradients /= np.linalg.norm(gradients, axis=1).max()
        weights = cagrad(gradients @ gradients.T, c)
        average = gradients.mean(axis=0)
        direction = weights @ gradients
        radius = c * np.linalg.norm(average)
        extra = weights - 1 / tasks
        assert extra.min() >= -1e-12
        assert np.linalg.norm(direction - average) <= radius * (1 + 1e-6) + 1e-12
        # Every w of the simplex bounds what any direction in the ball can reach.
        candidates = [shortest_weights(gradients), extra / max(extra.sum(), 1e-300)]
        bounds = [w @ gradients @ average + radius * np.linalg.norm(w @ gradients) for w in candidates]
        bound = min(bounds) if extra.sum() > 0 else bounds[0]
        assert (gradients @ direction).min() >= bound - 1e-7 * max(np.linalg.norm(average), 1e-3)


def test_cagrad_takes_the_nearest_direction_nobody_opposes_where_its_dual_is_silent():
    gradients = np.array([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.3, 1.0, 0.0], [0.0, 0.2, 1.0]])
    weights = cagrad(gradients @ gradients.T, c=0.9)
    np.testing.assert_allclose(weights @ gradients, [0.0, 0.3, 0.25], atol=1e-9)
    assert weights.max() < 1  # what makes g_w zero could be added without bound


def test_cagrad_without_a_ball_is_the_average_and_rescaling_divides():
    gradients = make_rng(14).standard_normal((3, 6))
    gramian = gradients @ gradients.T
    np.testing.assert_array_equal(cagrad(gramian, 0.0), np.full(3, 1 / 3))
    plain = cagrad(gramian, 0.5)
    np.testing.assert_allclose(cagrad(gramian, 0.5, rescale="square"), plain / 1.25)
    np.testing.assert_allclose(cagrad(gramian, 0.5, rescale="linear"), plain / 1.5)


def test_cagrad_is_the_one_of_torchjd():
    pytest.importorskip("cvxpy")
    aggregation = pytest.importorskip("torchjd.aggregation")
    for case in range(10):
        gradients = make_rng(case).standard_normal((4, 9))
        gramian = gradients @ gradients.T
        expected = aggregation.CAGradWeighting(c=0.5)(torch.tensor(gramian, dtype=torch.float64)).numpy()
        np.testing.assert_allclose(cagrad(gramian, 0.5), expected, rtol=1e-3)


def test_ordinary_gramians_take_one_or_two_programmes_on_the_way_to_the_face(monkeypatch):
    solved = count_calls(monkeypatch, _cagrad, "solve_nonnegative")
    for tasks, most in ((2, 1.95), (3, 2.1), (8, 2.55), (40, 3.5)):
        solved.clear()
        for case in range(100):
            gradients = regular_gradients(make_rng(tasks, case), tasks)
            cagrad(gradients @ gradients.T)
        assert len(solved) / 100 <= most, tasks
    solved.clear()
    cagrad(np.eye(3))  # every task gains, so that the face of all is the one: no search
    assert not solved


def test_cagrad_by_default_takes_the_radius_of_the_authors_and_does_not_rescale():
    gradients = regular_gradients(make_rng(3), 3)
    gramian = gradients @ gradients.T
    np.testing.assert_array_equal(cagrad(gramian), cagrad(gramian, 0.4, "none"))
