"""Nash-MTL as the original computes it, against its inner problem given to a general solver."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize

from forkmerge.methods.solvers import _nash_truncated, nash, nash_truncated
from gramians import count_calls, make_rng, regular_gradients


def _convex_concave(gramian: np.ndarray, previous: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """One iteration of Nash-MTL's original, its inner problem given to SLSQP as it stands in the paper."""
    costs = gramian.sum(axis=0) + 1 / previous + gramian @ (1 / (gramian @ previous))
    scale = costs @ previous
    feasible = 2 * nash(gramian, powers)
    constraint = {
        "type": "ineq",
        "fun": lambda a: np.log(np.maximum(a, 1e-9)) + np.log(np.maximum(gramian @ a, 1e-9) / powers),
        "jac": lambda a: np.diag(1 / a) + gramian / (gramian @ a)[:, None],
    }
    return minimize(
        lambda a: costs @ a / scale,
        feasible,
        jac=lambda a: costs / scale,
        bounds=[(1e-6, None)] * len(costs),
        constraints=[constraint],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    ).x


def test_truncated_nash_takes_the_steps_of_the_convex_concave_iteration():
    different = 0
    for case in range(80):
        rng = make_rng(case)
        gradients = rng.standard_normal((3, 5)) + rng.standard_normal(5)
        gramian = gradients @ gradients.T * 10 ** rng.uniform(-4, 0)
        powers = rng.uniform(0.3, 3, 3) if case % 2 else np.ones(3)
        exact = nash(gramian, powers)
        previous = exact * 10 ** rng.uniform(-2, 2, 3)
        if (gramian @ previous).min() <= 0:
            continue
        once = nash_truncated(gramian, previous, 1, powers)
        np.testing.assert_allclose(once, _convex_concave(gramian, previous, powers), rtol=1e-5)
        different += bool(np.abs(once / exact - 1).max() > 1e-3)
        twice = nash_truncated(gramian, previous, 2, powers)
        np.testing.assert_allclose(twice, nash_truncated(gramian, once, 1, powers), rtol=1e-5)
    assert different > 5  # otherwise this only tested the exact solution


def test_truncated_nash_stays_at_the_exact_solution():
    for case in range(20):
        rng = make_rng(case)
        gradients = regular_gradients(rng, 4)
        powers = rng.uniform(0.3, 2, 4)
        gramian = gradients @ gradients.T
        exact = nash(gramian, powers)
        np.testing.assert_allclose(nash_truncated(gramian, exact * 1.05, powers=powers), exact, rtol=1e-6)


def test_truncated_nash_keeps_its_weights_where_no_step_exists():
    previous = np.array([0.5, 2.0])
    np.testing.assert_allclose(nash_truncated([[1.0, -1.0], [-1.0, 1.0]], previous), previous, rtol=1e-15)
    np.testing.assert_allclose(nash_truncated([[1.0, -1.0], [-1.0, 1.0]]), np.ones(2), rtol=1e-15)
    outside = np.array([1.0, 0.45])  # (Ga)_2 < 0, and the linearised cost falls without bound
    np.testing.assert_allclose(nash_truncated([[1.0, -0.5], [-0.5, 1.0]], outside), outside, rtol=1e-15)
    edge = np.array([1.0, 0.5])  # (Ga)_2 = 0, where the logarithm has no slope
    np.testing.assert_allclose(nash_truncated([[1.0, -0.5], [-0.5, 1.0]], edge), edge, rtol=1e-15)
    assert nash_truncated([[1.0, 0.0], [0.0, 4.0]], [0.0, 1.0]).tolist() == nash([[1.0, 0.0], [0.0, 4.0]]).tolist()


def test_truncated_nash_reads_weights_of_zero_as_one():
    gramian = np.array([[1.0, 0.9], [0.9, 1.0]]) * 1e-4
    for iterations in (1, 20):
        fresh = nash_truncated(gramian, [1.0, 300.0], iterations)
        np.testing.assert_array_equal(nash_truncated(gramian, [0.0, 300.0], iterations), fresh)
    assert np.abs(nash_truncated(gramian, [2.0, 300.0], 1) - nash_truncated(gramian, [1.0, 300.0], 1)).max() > 1e-3


def test_truncated_nash_stops_when_its_weights_no_longer_change(monkeypatch):
    solved = []
    minimise = _nash_truncated._minimise
    monkeypatch.setattr(_nash_truncated, "_minimise", lambda *problem: solved.append(problem) or minimise(*problem))
    gradients = make_rng(3).standard_normal((4, 9)) + 1
    gramian = gradients @ gradients.T
    exact = nash(gramian)
    nash_truncated(gramian, exact)
    assert len(solved) == 1
    solved.clear()
    nash_truncated(gramian, 1.01 * exact)  # the first iteration finds the solution, the second sees that
    assert len(solved) == 2


def test_truncated_nash_solves_an_inner_problem_in_some_fifty_newton_steps(monkeypatch):
    solved, steps = count_calls(monkeypatch, _nash_truncated, "solve"), []
    for case in range(80):
        rng = make_rng(case)
        gradients = rng.standard_normal((3, 5)) + rng.standard_normal(5)
        gramian = gradients @ gradients.T * 10 ** rng.uniform(-4, 0)
        solved.clear()
        exact = nash(gramian)
        previous = exact * 10 ** rng.uniform(-2, 2, 3)
        weights = nash_truncated(gramian, previous, 1)
        steps.append(len(solved))
        # Where the constraints are tight at the solution, one system shows it.
        if not np.allclose(weights, previous):
            assert np.allclose(weights, exact, rtol=1e-9, atol=0) == (len(solved) == 1)
    assert 40 < np.mean([count for count in steps if count > 10]) < 51
