"""Nash-MTL and AuxiNash: the bargaining solution against an independent solver, and where none exists."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize, root

from forkmerge.methods.solvers import _nash, nash, nash_jacobian, nash_truncated
from gramians import TASKS, count_calls, dependent_gradients, make_rng, regular_gradients, shortest_weights


def _bargained(gradients: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """Nash-MTL's weights by scipy: a quasi-Newton minimiser in the logarithm, then a root finder."""
    unit = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
    cosines = unit @ unit.T

    def objective(logs: np.ndarray) -> tuple[float, np.ndarray]:
        b = np.exp(logs)
        return 0.5 * b @ cosines @ b - powers @ logs, b * (cosines @ b) - powers

    def jacobian(logs: np.ndarray) -> np.ndarray:
        b = np.exp(logs)
        return np.diag(b * (cosines @ b)) + np.outer(b, b) * cosines

    rough = minimize(objective, np.zeros(len(unit)), jac=True, method="BFGS").x
    solution = root(lambda logs: objective(logs)[1], rough, jac=jacobian, tol=1e-15)
    return np.exp(solution.x) / np.linalg.norm(gradients, axis=1)


@pytest.mark.parametrize("tasks", TASKS)
def test_nash_agrees_with_an_independent_solver(tasks):
    for case in range(100):
        rng = make_rng(tasks, case)
        gradients = regular_gradients(rng, tasks)
        powers = rng.uniform(0.1, 3, tasks) if case % 2 else np.ones(tasks)
        weights = nash(gradients @ gradients.T, powers if case % 2 else None)
        expected = _bargained(gradients, powers)
        np.testing.assert_allclose(weights, expected, rtol=1e-10)


@pytest.mark.parametrize("tasks", TASKS[1:])
def test_nash_solves_dependent_gradients_and_stays_bounded_at_stationary_points(tasks):
    seen = {"solved": 0, "stationary": 0}
    for case in range(50):
        gradients = dependent_gradients(make_rng(tasks, case), tasks)
        unit = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
        length = np.linalg.norm(shortest_weights(unit) @ unit)
        weights = nash(gradients @ gradients.T)
        scaled = weights * np.linalg.norm(gradients, axis=1)
        assert (weights > 0).all()
        if length > 1e-3:
            seen["solved"] += 1
            np.testing.assert_allclose(scaled * (unit @ unit.T @ scaled), 1, atol=1e-9)
            np.testing.assert_allclose(weights, _bargained(gradients, np.ones(tasks)), rtol=1e-8)
        elif length < 1e-7:
            seen["stationary"] += 1
            assert scaled.max() <= 1.01e5 * np.sqrt(tasks)
            direction = scaled @ unit
            assert direction @ direction <= tasks * (1 + 1e-6)
            shares = scaled / scaled.sum()
            assert np.linalg.norm(shares @ unit) <= 1e-5 * np.sqrt(tasks)
    assert min(seen.values()) > 2


def test_nash_of_orthogonal_gradients_is_known():
    squares, powers = np.array([4.0, 0.25, 9.0]), np.array([0.5, 2.0, 1.0])
    np.testing.assert_allclose(nash(np.diag(squares)), squares**-0.5, rtol=1e-14)
    np.testing.assert_allclose(nash(np.diag(squares), powers), np.sqrt(powers / squares), rtol=1e-14)
    np.testing.assert_allclose(nash_truncated(np.diag(squares), powers=powers), np.sqrt(powers / squares), rtol=1e-12)


def test_the_jacobian_of_nash_is_its_derivative_by_the_powers():
    gradients = regular_gradients(make_rng(11), 4)
    gradients[2] = 0
    gramian = gradients @ gradients.T
    powers = np.array([0.5, 1.0, 1.0, 2.0])
    jacobian = nash_jacobian(gramian, nash(gramian, powers), powers)
    for column, direction in zip(jacobian.T, np.eye(4), strict=True):
        difference = nash(gramian, powers + 1e-5 * direction) - nash(gramian, powers - 1e-5 * direction)
        np.testing.assert_allclose(column, difference / 2e-5, rtol=1e-6)


def test_ordinary_gramians_take_a_handful_of_newton_steps(monkeypatch):
    solved = count_calls(monkeypatch, _nash, "solve")
    for tasks, most in ((2, 1.0), (3, 3.7), (8, 4.5), (40, 6.0)):
        solved.clear()
        for case in range(100):
            gradients = regular_gradients(make_rng(tasks, case), tasks)
            nash(gradients @ gradients.T)
        assert len(solved) / 100 <= most, tasks


def test_a_gramian_that_rounding_made_indefinite_gets_a_ridge_of_twice_that():
    for excess in (1e-7, 1e-6, 1e-4):
        cosines = np.array([[1.0, -1 - excess], [-1 - excess, 1.0]])  # its smallest eigenvalue is −excess
        np.testing.assert_allclose(nash(cosines), np.full(2, excess**-0.5), rtol=1e-6)
        norms = np.array([2.0, 0.5])
        np.testing.assert_allclose(nash(cosines * norms * norms[:, None]), excess**-0.5 / norms, rtol=1e-6)


def test_what_counts_as_stationary_can_be_chosen():
    cosines = np.array([[1.0, -1.0], [-1.0, 1.0]])
    for stationary in (1e-10, 1e-6):
        weights = nash(cosines, stationary=stationary)
        np.testing.assert_allclose(weights, np.full(2, stationary**-0.5), rtol=1e-3)
    short = np.array([[1.0, -0.99], [-0.99, 1.0]])  # the shortest convex combination has the squared length 0.005
    np.testing.assert_allclose(nash(short), np.full(2, 10.0), rtol=1e-12)
    assert nash(short, stationary=0.1).max() < 4


def test_nearly_opposite_gradients_are_solved_as_long_as_they_are_not_stationary():
    for gap in (1e-2, 1e-4, 1e-6, 1e-8):  # the shortest convex combination has the squared length gap/2
        weights = nash([[1.0, gap - 1], [gap - 1, 1.0]])
        np.testing.assert_allclose(weights, np.full(2, gap**-0.5), rtol=1e-6)


def test_a_step_is_halved_until_the_objective_falls_as_much_as_its_slope_promises():
    halved = 0
    for case in range(300):
        rng = make_rng(case)
        unit = rng.standard_normal((4, 5)) + rng.choice([0.0, 1.0])
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        cosines, powers, solution = unit @ unit.T, rng.uniform(0.3, 3, 4), 10 ** rng.uniform(-1, 0.5, 4)

        def objective(b, cosines=cosines, powers=powers):
            return 0.5 * b @ cosines @ b - powers @ np.log(b)

        residual = powers - solution * (cosines @ solution)
        step = residual * 10 ** rng.uniform(-1, 1)  # along the slope; Newton's own is hardly ever too long
        decrease = residual @ step
        scale = min(1.0, -0.95 / min(step.min(), -1e-300))  # 0.95 of the way to the first weight of zero
        while objective(solution) - objective(solution * (1 + scale * step)) < 0.1 * scale * decrease:
            scale /= 2
            halved += 1
        assert _nash._damping(cosines, powers, solution, step, decrease) == pytest.approx(scale, rel=1e-12)
    assert halved > 20
