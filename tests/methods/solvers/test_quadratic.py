"""The quadratic programme against scipy's non-negative least squares, also by the slow method it falls back on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from forkmerge.methods.solvers import _quadratic, min_norm
from forkmerge.methods.solvers._quadratic import solve_nonnegative
from gramians import count_calls, make_rng, regular_gradients


@pytest.fixture(params=["exchanges", "one by one"])
def method(request, monkeypatch):
    if request.param == "one by one":
        monkeypatch.setattr(_quadratic, "_EXCHANGES", 0)
    return request.param


def test_the_solution_is_that_of_an_independent_solver_from_any_first_guess(method):
    for case in range(200):
        rng = make_rng(case)
        tasks = int(rng.integers(1, 9)) if case % 4 else 30
        matrix = rng.standard_normal((tasks + 4, tasks)) * 10 ** rng.uniform(-2, 2, tasks)
        side = matrix @ rng.standard_normal(tasks) + rng.standard_normal(tasks + 4)
        guess = rng.random(tasks) < 0.5
        solution, passive = solve_nonnegative(matrix.T @ matrix, matrix.T @ side, guess)
        expected, _ = nnls(matrix, side)
        np.testing.assert_allclose(solution, expected, rtol=1e-7, atol=1e-9 * expected.max(initial=0.0))
        np.testing.assert_array_equal(passive, expected > 0)
        np.testing.assert_array_equal(solution == 0, ~passive)


def test_a_coordinate_that_was_added_too_early_leaves_again(method):
    # The second coordinate has the largest gain alone and is negative beside the two others.
    hessian = np.array([[1.0, 0.9, 0.0], [0.9, 2.0, 0.9], [0.0, 0.9, 1.0]])
    linear = np.array([1.0, 1.5, 1.0])
    solution, passive = solve_nonnegative(hessian, linear, np.zeros(3, dtype=bool))
    np.testing.assert_allclose(solution, [1.0, 0.0, 1.0], rtol=1e-14)
    assert passive.tolist() == [True, False, True]


def test_nothing_is_positive_where_nothing_gains(method):
    for side in (-np.ones(3), np.zeros(3)):
        solution, _ = solve_nonnegative(np.eye(3), side, np.ones(3, dtype=bool))
        np.testing.assert_array_equal(solution, np.zeros(3))


def test_dependent_columns_reach_the_minimum(method):
    for case in range(100):
        rng = make_rng(case)
        columns = rng.standard_normal((3, 6)) + rng.choice([0.0, 2.0]) * rng.standard_normal((3, 1))
        columns[:, 1] = columns[:, 0]
        columns[:, 2] = -2 * columns[:, 3]
        hessian = columns.T @ columns
        hessian.flat[::7] += 6 * np.finfo(float).eps  # as min_norm and cagrad do
        side = columns.T @ rng.standard_normal(3)
        solution, _ = solve_nonnegative(hessian, side, np.ones(6, dtype=bool))
        assert solution.min() >= 0
        slack = hessian @ solution - side
        size = np.abs(solution).max() + np.abs(side).max()
        assert slack.min() >= -1e-12 * size
        assert abs(solution @ slack) <= 1e-10 * size**2


def test_ordinary_programmes_take_a_handful_of_solves_and_never_the_slow_method(monkeypatch):
    solved = count_calls(monkeypatch, _quadratic, "solve")
    slow = count_calls(monkeypatch, _quadratic, "_solve_one_by_one")
    for tasks, most in ((2, 1.6), (8, 2.8), (40, 5.0)):
        solved.clear()
        for case in range(100):
            gradients = regular_gradients(make_rng(tasks, case), tasks)
            min_norm(gradients @ gradients.T)
        assert len(solved) / 100 <= most, tasks
    assert not slow
