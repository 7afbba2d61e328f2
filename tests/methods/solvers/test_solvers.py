"""The Gramian solvers: against independent solvers, against twins on real vectors, and where no solution exists."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, nnls, root

from forkmerge.errors import ProblemError
from forkmerge.methods import solvers
from forkmerge.methods.solvers import (
    arml_step,
    cagrad,
    clean,
    gcs,
    gradvac,
    imtl_g,
    min_norm,
    min_norm_frank_wolfe,
    nash,
    nash_jacobian,
    nash_truncated,
    pcgrad,
)

TASKS = (1, 2, 3, 8, 40)
RADIUS = 0.4
# g_m, g_1, g_2 of the quadratics ½‖θ − c_i‖² at 0 that the reference values are given for.
FIXTURE = np.array([[-1.0, 0.0], [-1.0, -1.0], [1.0, -0.5]])


def _rng(*key: int) -> np.random.Generator:
    return np.random.default_rng([2024, *key])


def _orders(rng: np.random.Generator, tasks: int) -> np.ndarray:
    return np.stack([rng.permutation(tasks) for _ in range(tasks)])


def _regular(rng: np.random.Generator, tasks: int) -> np.ndarray:
    """Independent gradients, conflicting or not, of norms within two decades, at any scale."""
    gradients = rng.standard_normal((tasks, tasks + int(rng.integers(2, 60))))
    gradients += rng.choice([0.0, 0.5, 2.0]) * rng.standard_normal(gradients.shape[1])
    gradients *= 10 ** rng.uniform(-1, 1, (tasks, 1))
    return gradients * 10 ** rng.uniform(-8, 8)


def _singular(rng: np.random.Generator, tasks: int) -> np.ndarray:
    """Dependent gradients: too few dimensions, copies, opposites."""
    kind = int(rng.integers(4))
    gradients = rng.standard_normal((tasks, max(1, tasks // 2) if kind == 0 else tasks + 5))
    if kind != 1:  # kind 0 in the open, the others around a common direction
        gradients += rng.choice([0.0, 3.0]) * rng.standard_normal(gradients.shape[1])
    if kind:
        gradients[0] = gradients[-1] * (-2.0 if kind == 1 else rng.choice([1.0, 0.5, 3.0]))
    if kind == 3:
        gradients[tasks // 2] = gradients[[0, -1]].mean(axis=0)
    return gradients * 10 ** rng.uniform(-8, 8)


def _shortest(gradients: np.ndarray) -> np.ndarray:
    """MGDA's weights by scipy's active-set solver on the gradients themselves, not on their Gramian."""
    scale = np.linalg.norm(gradients, axis=1).min()
    matrix = np.vstack([gradients.T / scale, np.ones(len(gradients))])
    weights, _ = nnls(matrix, np.append(np.zeros(gradients.shape[1]), 1.0), maxiter=1000)
    return weights / weights.sum()


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
    found = root(lambda logs: objective(logs)[1], rough, jac=jacobian, tol=1e-15)
    return np.exp(found.x) / np.linalg.norm(gradients, axis=1)


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
    found = root(conditions, start, jac=jacobian, tol=1e-15).x
    w = np.zeros(tasks)
    w[support] = found[:-1]
    outside = np.delete(slope(w), support) - found[-1]
    return w, min([*outside, *found[:-1]])


def _cagrad_weights(gradients: np.ndarray, c: float, w: np.ndarray) -> np.ndarray:
    average = np.linalg.norm(gradients.mean(axis=0))
    return 1 / len(w) + c * average / np.linalg.norm(w @ gradients) * w


def _assert_close(weights: np.ndarray, expected: np.ndarray, gradients: np.ndarray) -> None:
    """Compare to 1e-10 what each task brings into the direction."""
    norms = np.linalg.norm(gradients, axis=1)
    np.testing.assert_allclose(weights * norms, expected * norms, rtol=0, atol=1e-10 * np.abs(expected * norms).max())


# Where the solution is unique and well conditioned: 100 Gramians for each number of tasks, 500 in all


@pytest.mark.parametrize("tasks", TASKS)
def test_min_norm_agrees_with_an_independent_solver(tasks):
    for case in range(100):
        gradients = _regular(_rng(tasks, case), tasks)
        weights = min_norm(gradients @ gradients.T)
        assert weights.min() >= 0
        np.testing.assert_allclose(weights.sum(), 1, rtol=1e-14)
        np.testing.assert_allclose(weights, _shortest(gradients), rtol=0, atol=1e-10)


@pytest.mark.parametrize("tasks", TASKS)
def test_nash_agrees_with_an_independent_solver(tasks):
    for case in range(100):
        rng = _rng(tasks, case)
        gradients = _regular(rng, tasks)
        powers = rng.uniform(0.1, 3, tasks) if case % 2 else np.ones(tasks)
        weights = nash(gradients @ gradients.T, powers if case % 2 else None)
        expected = _bargained(gradients, powers)
        np.testing.assert_allclose(weights, expected, rtol=1e-10)


@pytest.mark.parametrize("tasks", TASKS)
def test_cagrad_agrees_with_an_independent_solver(tasks):
    compared = 0
    for case in range(100):
        gradients = _regular(_rng(tasks, case), tasks)
        w, margin = _cagrad_dual(gradients, RADIUS)
        if margin < 1e-6:  # a face is decided by the last digits, or the root finder left the simplex
            continue
        compared += 1
        weights = cagrad(gradients @ gradients.T, RADIUS)
        _assert_close(weights, _cagrad_weights(gradients, RADIUS, w), gradients)
    assert compared > 80


@pytest.mark.parametrize("tasks", TASKS)
def test_imtl_g_agrees_with_the_formula_of_its_paper(tasks):
    compared = 0
    for case in range(100):
        gradients = _regular(_rng(tasks, case), tasks)
        unit = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
        differences, directions = gradients[0] - gradients[1:], unit[0] - unit[1:]
        others = np.linalg.solve(directions @ differences.T, directions @ gradients[0])
        expected = np.append(1 - others.sum(), others)
        if np.linalg.cond(unit) > 100 or np.abs(expected).max() > 100:
            continue
        compared += 1
        np.testing.assert_allclose(imtl_g(gradients @ gradients.T), expected, rtol=0, atol=1e-10)
    assert compared > 80


# Where it is not: objective, optimality conditions and direction


@pytest.mark.parametrize("tasks", TASKS[1:])
def test_min_norm_of_dependent_gradients_is_optimal_and_gives_the_shortest_vector(tasks):
    for case in range(50):
        gradients = _singular(_rng(tasks, case), tasks)
        largest = np.linalg.norm(gradients, axis=1).max()
        direction = min_norm(gradients @ gradients.T) @ gradients / largest
        expected = _shortest(gradients) @ gradients / largest
        # Rounding of the Gramian, 1e-16, is what a squared length can be known to.
        np.testing.assert_allclose(direction @ direction, expected @ expected, rtol=1e-10, atol=1e-14)
        assert (gradients @ direction / largest >= direction @ direction - 1e-10).all()
        np.testing.assert_allclose(direction, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tasks", TASKS[1:])
def test_nash_solves_dependent_gradients_and_stays_bounded_at_stationary_points(tasks):
    seen = {"solved": 0, "stationary": 0}
    for case in range(50):
        gradients = _singular(_rng(tasks, case), tasks)
        unit = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
        shortest = np.linalg.norm(_shortest(unit) @ unit)
        weights = nash(gradients @ gradients.T)
        scaled = weights * np.linalg.norm(gradients, axis=1)
        assert (weights > 0).all()
        if shortest > 1e-3:
            seen["solved"] += 1
            np.testing.assert_allclose(scaled * (unit @ unit.T @ scaled), 1, atol=1e-9)
            np.testing.assert_allclose(weights, _bargained(gradients, np.ones(tasks)), rtol=1e-8)
        elif shortest < 1e-7:
            seen["stationary"] += 1
            assert scaled.max() <= 1.01e5 * np.sqrt(tasks)
            direction = scaled @ unit
            assert direction @ direction <= tasks * (1 + 1e-6)
            shares = scaled / scaled.sum()
            assert np.linalg.norm(shares @ unit) <= 1e-5 * np.sqrt(tasks)
    assert min(seen.values()) > 2


@pytest.mark.parametrize("c", [0.1, 0.4, 1.0, 2.0])
@pytest.mark.parametrize("tasks", TASKS[1:])
def test_cagrad_of_dependent_gradients_reaches_the_bound_of_its_dual(tasks, c):
    for case in range(25):
        gradients = _singular(_rng(tasks, case), tasks)
        gradients /= np.linalg.norm(gradients, axis=1).max()
        weights = cagrad(gradients @ gradients.T, c)
        average = gradients.mean(axis=0)
        direction = weights @ gradients
        radius = c * np.linalg.norm(average)
        extra = weights - 1 / tasks
        assert extra.min() >= -1e-12
        assert np.linalg.norm(direction - average) <= radius * (1 + 1e-6) + 1e-12
        # Every w of the simplex bounds what any direction in the ball can reach.
        candidates = [_shortest(gradients), extra / max(extra.sum(), 1e-300)]
        bounds = [w @ gradients @ average + radius * np.linalg.norm(w @ gradients) for w in candidates]
        bound = min(bounds) if extra.sum() > 0 else bounds[0]
        assert (gradients @ direction).min() >= bound - 1e-7 * max(np.linalg.norm(average), 1e-3)


def test_cagrad_takes_the_nearest_direction_nobody_opposes_where_its_dual_is_silent():
    gradients = np.array([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.3, 1.0, 0.0], [0.0, 0.2, 1.0]])
    weights = cagrad(gradients @ gradients.T, c=0.9)
    np.testing.assert_allclose(weights @ gradients, [0.0, 0.3, 0.25], atol=1e-9)
    assert weights.max() < 1  # what makes g_w zero could be added without bound


def test_imtl_g_of_dependent_gradients_keeps_equal_projections_where_they_exist():
    gradients = np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]])
    weights = imtl_g(gradients @ gradients.T)
    np.testing.assert_allclose(weights.sum(), 1)
    projections = gradients @ (weights @ gradients) / np.linalg.norm(gradients, axis=1)
    np.testing.assert_allclose(projections, projections[0])


def test_imtl_g_of_more_tasks_than_dimensions_is_the_least_squares_compromise():
    for case in range(20):
        gradients = _rng(case).standard_normal((4, 2))
        unit = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
        expected = np.linalg.lstsq(unit, np.ones(4), rcond=None)[0]  # the d with unit·d nearest to 1
        direction = imtl_g(gradients @ gradients.T) @ gradients
        np.testing.assert_allclose(direction / np.linalg.norm(direction), _signed(expected, direction), atol=1e-9)


def _signed(vector: np.ndarray, like: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector) * np.sign(vector @ like)


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


def test_gramians_of_rounded_float32_gradients_give_finite_weights():
    for case in range(20):
        rng = _rng(case)
        gradients = rng.standard_normal((4, 500)).astype(np.float32)
        gradients[1] = -gradients[0]
        gradients[3] = gradients[2]
        gramian = (gradients @ gradients.T).astype(np.float64)
        gramian *= 1 + 1e-7 * rng.standard_normal(gramian.shape)  # not even symmetric any more
        for solver in (min_norm, min_norm_frank_wolfe, nash, nash_truncated, cagrad, imtl_g, pcgrad):
            assert np.isfinite(solver(gramian)).all(), solver.__name__
        assert np.linalg.norm(min_norm(gramian) @ gradients) < 0.01 * np.linalg.norm(gradients[0])


# Scales, norms, unusable tasks

_ORDER = _orders(_rng(5), 5)
_GOALS = _rng(6).uniform(-0.2, 0.6, (5, 5))
SOLVERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "min_norm": min_norm,
    "min_norm_frank_wolfe": min_norm_frank_wolfe,
    "nash": nash,
    "nash_truncated": lambda gramian: nash_truncated(gramian, nash(gramian)),
    "cagrad": cagrad,
    "imtl_g": imtl_g,
    "pcgrad": lambda gramian: pcgrad(gramian, _ORDER[: len(gramian)]),
    "pcgrad_target": lambda gramian: pcgrad(gramian, target=0),
    "gradvac": lambda gramian: gradvac(gramian, _ORDER, _GOALS)[0],
    "gradvac_target": lambda gramian: gradvac(gramian, None, _GOALS, target=0)[0],
    "gcs": lambda gramian: gcs(gramian, 0, weighted=True),
    "gcs_unweighted": lambda gramian: gcs(gramian, 0, weighted=False),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_the_scale_of_all_gradients_changes_nothing_but_the_scale(name):
    gradients = _rng(7).standard_normal((5, 9))
    gramian = gradients @ gradients.T
    expected = SOLVERS[name](gramian)
    for exponent in (-8, -3, 4, 8):
        scale = 10.0**exponent
        weights = SOLVERS[name](gramian * scale**2)
        if name.startswith("nash"):  # its direction has a fixed length
            weights = weights * scale
        np.testing.assert_allclose(weights, expected, rtol=1e-9)


@pytest.mark.parametrize("name", SOLVERS)
def test_gradients_of_very_different_norms_keep_their_digits(name):
    norms = np.array([1e-8, 1e8, 1.0, 1e-3, 1e4])
    weights = SOLVERS[name](np.diag(norms**2))
    if name.startswith("min_norm"):
        expected = norms**-2 / (norms**-2).sum()
    elif name == "imtl_g":
        expected = 1 / norms / (1 / norms).sum()
    elif name.startswith("nash"):
        expected = 1 / norms
    elif name.startswith("gcs"):
        expected = np.eye(5)[0]
    elif name in {"pcgrad", "pcgrad_target"}:
        expected = np.ones(5)
    else:
        expected = None
    if expected is not None and name != "min_norm_frank_wolfe":
        np.testing.assert_allclose(weights, expected, rtol=1e-9)
    assert np.isfinite(weights).all()


def test_very_different_norms_of_correlated_gradients_satisfy_each_methods_equations():
    for case in range(50):
        rng = _rng(case)
        unit = rng.standard_normal((4, 7))
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        cosines, norms = unit @ unit.T, 10 ** rng.uniform(-8, 8, 4)
        gramian = cosines * norms * norms[:, None]
        a = nash(gramian) * norms
        np.testing.assert_allclose(a * (cosines @ a), 1, rtol=1e-12)
        v = imtl_g(gramian) * norms
        np.testing.assert_allclose(cosines @ v, (cosines @ v)[0], rtol=1e-9)
        v = min_norm(gramian) * norms / norms.min()
        assert (cosines @ v >= v @ cosines @ v * norms.min() / norms - 1e-12).all()
        extra = (cagrad(gramian, RADIUS) - 0.25) * norms / norms.max()
        average = norms / norms.max() / 4
        radius = RADIUS * np.sqrt(average @ cosines @ average)
        np.testing.assert_allclose(np.sqrt(extra @ cosines @ extra), radius, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_zero_or_non_finite_gradient_gets_weight_zero_and_the_others_do_not_notice(name, value):
    gradients = _rng(8).standard_normal((5, 9))
    gradients[3] = 0.0
    expected = SOLVERS[name](gradients @ gradients.T)
    gramian = gradients @ gradients.T
    if value != 0.0:
        gramian[3] = gramian[:, 3] = value
    weights = SOLVERS[name](gramian)
    np.testing.assert_array_equal(weights, expected)
    assert weights[3] == 0
    assert np.isfinite(weights).all()
    assert (weights[[0, 1, 2, 4]] != 0).any()
    if "vac" not in name and "pcgrad" not in name:
        rest = np.delete(np.delete(gramian, 3, 0), 3, 1)
        np.testing.assert_allclose(np.delete(weights, 3), SOLVERS[name](rest), rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, np.nan])
@pytest.mark.parametrize("name", SOLVERS)
def test_without_any_usable_gradient_all_weights_are_zero(name, value):
    np.testing.assert_array_equal(SOLVERS[name](np.full((5, 5), value)), np.zeros(5))


def test_an_unusable_target_stops_gcs_and_leaves_target_aware_surgery_without_corrections():
    gradients = _rng(9).standard_normal((5, 9))
    gradients[0] = 0
    gramian = gradients @ gradients.T
    np.testing.assert_array_equal(gcs(gramian, 0, weighted=True), np.zeros(5))
    np.testing.assert_array_equal(pcgrad(gramian, target=0), [0, 1, 1, 1, 1])
    np.testing.assert_array_equal(gradvac(gramian, None, _GOALS, target=0)[0], [0, 1, 1, 1, 1])


def test_clean_names_the_unusable_tasks_and_keeps_the_others():
    gradients = _rng(10).standard_normal((4, 6))
    gramian = gradients @ gradients.T
    same, bad = clean(gramian)
    assert same is gramian
    assert bad.tolist() == []
    spoilt = gramian.copy()
    spoilt[1] = spoilt[:, 1] = np.nan
    spoilt[3] = spoilt[:, 3] = 0
    cleaned, bad = clean(spoilt)
    assert bad.tolist() == [1, 3]
    np.testing.assert_array_equal(cleaned[np.ix_([0, 2], [0, 2])], gramian[np.ix_([0, 2], [0, 2])])
    assert not cleaned[[1, 3]].any()
    assert not cleaned[:, [1, 3]].any()
    clash = gramian.copy()
    clash[0, 2] = clash[2, 0] = np.inf
    assert clean(clash)[1].tolist() == [0, 2]
    assert clean(gramian.astype(np.float32))[0].dtype == np.float64


# The truncated originals


def test_frank_wolfe_approaches_the_exact_solution_and_stops_where_told():
    for case in range(20):
        gradients = _regular(_rng(3, case), 3)
        gramian = gradients @ gradients.T
        exact, rough = min_norm(gramian), min_norm_frank_wolfe(gramian)
        assert exact @ gramian @ exact <= rough @ gramian @ rough * (1 + 1e-12)
        np.testing.assert_allclose(rough @ gramian @ rough, exact @ gramian @ exact, rtol=0.02)
        once = min_norm_frank_wolfe(gramian, iterations=1)
        assert (np.sort(once)[:2] <= 1 / 3 + 1e-12).all()


def _convex_concave(gramian: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """One iteration of Nash-MTL's original, its inner problem given to SLSQP as it stands in the paper."""
    costs = gramian.sum(axis=0) + 1 / previous + gramian @ (1 / (gramian @ previous))
    scale = costs @ previous
    feasible = 2 * nash(gramian)
    constraint = {
        "type": "ineq",
        "fun": lambda a: np.log(np.maximum(a, 1e-9)) + np.log(np.maximum(gramian @ a, 1e-9)),
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
    for case in range(60):
        rng = _rng(case)
        gradients = 0.1 * (rng.standard_normal((3, 5)) + rng.standard_normal(5))
        gramian = gradients @ gradients.T
        previous = nash(gramian) * 10 ** rng.uniform(-2, 2, 3)
        if (gramian @ previous).min() <= 0:
            continue
        once = nash_truncated(gramian, previous, iterations=1)
        np.testing.assert_allclose(once, _convex_concave(gramian, previous), rtol=1e-5)
        different += bool(np.abs(once / nash(gramian) - 1).max() > 1e-3)
        twice = nash_truncated(gramian, previous, iterations=2)
        np.testing.assert_allclose(twice, nash_truncated(gramian, once, iterations=1), rtol=1e-5)
    assert different > 3  # otherwise this only tested the exact solution


def test_truncated_nash_stays_at_the_exact_solution():
    for case in range(20):
        rng = _rng(case)
        gradients = _regular(rng, 4)
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
    assert nash_truncated([[1.0, 0.0], [0.0, 4.0]], [0.0, 1.0]).tolist() == nash([[1.0, 0.0], [0.0, 4.0]]).tolist()


def test_the_jacobian_of_nash_is_its_derivative_by_the_powers():
    gradients = _regular(_rng(11), 4)
    gradients[2] = 0
    gramian = gradients @ gradients.T
    powers = np.array([0.5, 1.0, 1.0, 2.0])
    jacobian = nash_jacobian(gramian, nash(gramian, powers), powers)
    for column, direction in zip(jacobian.T, np.eye(4), strict=True):
        difference = nash(gramian, powers + 1e-5 * direction) - nash(gramian, powers - 1e-5 * direction)
        np.testing.assert_allclose(column, difference / 2e-5, rtol=1e-6)


# Twins on real vectors


def _project(gradients: np.ndarray, order: np.ndarray) -> np.ndarray:
    corrected = gradients.copy()
    for i, row in enumerate(order):
        for j in row:
            product = corrected[i] @ gradients[j]
            if j != i and product < 0:
                corrected[i] -= product / (gradients[j] @ gradients[j]) * gradients[j]
    return corrected.sum(axis=0)


def _vaccinate(gradients: np.ndarray, order: np.ndarray, goals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    corrected, observed = gradients.copy(), goals.copy()
    for i, row in enumerate(order):
        for j in row:
            if j == i:
                continue
            own, other = np.linalg.norm(corrected[i]), np.linalg.norm(gradients[j])
            cosine, goal = corrected[i] @ gradients[j] / own / other, goals[i, j]
            observed[i, j] = cosine
            if cosine < goal:
                lift = goal * np.sqrt(1 - cosine**2) - cosine * np.sqrt(1 - goal**2)
                corrected[i] += own * lift / (other * np.sqrt(1 - goal**2)) * gradients[j]
    return corrected.sum(axis=0), observed


@pytest.mark.parametrize("tasks", TASKS)
def test_pcgrad_is_the_sum_of_projected_vectors(tasks):
    for case in range(10):
        rng = _rng(tasks, case)
        gradients = _regular(rng, tasks) if case % 2 else _singular(rng, tasks)
        order = _orders(rng, tasks)
        largest = np.abs(gradients).max()
        direction = pcgrad(gradients @ gradients.T, order) @ gradients
        np.testing.assert_allclose(direction, _project(gradients, order), rtol=0, atol=1e-10 * largest)
        target = int(rng.integers(tasks))
        own = gradients[target] / np.linalg.norm(gradients[target])
        expected = gradients - np.minimum(gradients @ own, 0)[:, None] * own
        direction = pcgrad(gradients @ gradients.T, target=target) @ gradients
        np.testing.assert_allclose(direction, expected.sum(axis=0), rtol=0, atol=1e-10 * largest)


@pytest.mark.parametrize("tasks", TASKS)
def test_gradvac_is_the_sum_of_vaccinated_vectors(tasks):
    for case in range(10):
        rng = _rng(tasks, case)
        gradients = _regular(rng, tasks)
        order, goals = _orders(rng, tasks), rng.uniform(-0.5, 0.7, (tasks, tasks))
        weights, observed = gradvac(gradients @ gradients.T, order, goals)
        expected, cosines = _vaccinate(gradients, order, goals)
        np.testing.assert_allclose(weights @ gradients, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
        np.testing.assert_allclose(observed, cosines, atol=1e-10)


def test_target_aware_gradvac_corrects_each_auxiliary_towards_the_target_alone():
    rng = _rng(12)
    gradients, goals = _regular(rng, 4), rng.uniform(-0.5, 0.7, (4, 4))
    weights, observed = gradvac(gradients @ gradients.T, None, goals, target=1)
    expected, cosines = _vaccinate(gradients, np.full((4, 1), 1), goals)
    np.testing.assert_allclose(weights @ gradients, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    np.testing.assert_allclose(observed, cosines, atol=1e-12)
    assert (np.delete(weights, 1) == 1).all()


def test_gradvac_with_goals_of_zero_is_pcgrad():
    rng = _rng(13)
    gradients, order = _regular(rng, 6), _orders(rng, 6)
    gramian = gradients @ gradients.T
    np.testing.assert_allclose(gradvac(gramian, order, np.zeros((6, 6)))[0], pcgrad(gramian, order), rtol=1e-10)


def test_gradvac_survives_opposite_gradients_and_goals_of_one():
    gradients = np.array([[1.0, 0.0], [-2.0, 0.0], [1.0, 1.0]])
    for goal in (-1.0, 0.0, 1.0):
        weights, observed = gradvac(gradients @ gradients.T, None, np.full((3, 3), goal))
        assert np.isfinite(weights).all()
        assert (np.abs(observed) <= 1).all()


# Values given with the update rules


def test_gcs_on_the_fixture():
    gramian = FIXTURE @ FIXTURE.T
    np.testing.assert_array_equal(gcs(gramian, 0, weighted=False) @ FIXTURE, [-2, -1])
    np.testing.assert_allclose(gcs(gramian, 0, weighted=True) @ FIXTURE, [-1.70711, -0.70711], atol=1e-5)
    np.testing.assert_allclose(gcs(gramian, 0, weighted=True)[1], 0.70711, atol=1e-5)


def test_arml_on_the_fixture():
    gramian = FIXTURE @ FIXTURE.T
    start = np.ones(3)
    np.testing.assert_allclose(arml_step(gramian, 0, start, lr=0.05), [1, 1.0625, 0.9375], rtol=1e-14)
    # Without shift and clamp the step would be lr times the gradient (1.0, 3.5); the shift adds 2.25·lr to both.
    moved = arml_step(gramian, 0, start, lr=1e-3)[1:] - 1
    np.testing.assert_allclose((2.25e-3 - moved) / 1e-3, [1.0, 3.5], rtol=1e-9)
    np.testing.assert_array_equal(start, np.ones(3))


def test_arml_clamps_after_the_shift_and_ignores_unusable_gradients():
    gramian = FIXTURE @ FIXTURE.T
    np.testing.assert_allclose(arml_step(gramian, 0, [1, 1, 1], lr=1.0), [1, 2.25, 0], rtol=1e-14)
    spoilt = gramian.copy()
    spoilt[2] = spoilt[:, 2] = np.nan
    np.testing.assert_allclose(arml_step(spoilt, 0, [1, 1, 1], lr=0.05), [1, 0.95, 1.05], rtol=1e-14)
    spoilt = gramian.copy()
    spoilt[0] = spoilt[:, 0] = 0
    np.testing.assert_allclose(arml_step(spoilt, 0, [1, 1.5, 0.5], lr=0.05), [1, 1.5, 0.5], rtol=1e-14)
    np.testing.assert_array_equal(arml_step([[2.0]], 0, [1.0], lr=0.05), [1.0])


def test_nash_of_orthogonal_gradients_is_known():
    squares, powers = np.array([4.0, 0.25, 9.0]), np.array([0.5, 2.0, 1.0])
    np.testing.assert_allclose(nash(np.diag(squares)), squares**-0.5, rtol=1e-14)
    np.testing.assert_allclose(nash(np.diag(squares), powers), np.sqrt(powers / squares), rtol=1e-14)
    np.testing.assert_allclose(nash_truncated(np.diag(squares), powers=powers), np.sqrt(powers / squares), rtol=1e-12)


def test_cagrad_without_a_ball_is_the_average_and_rescaling_divides():
    gradients = _rng(14).standard_normal((3, 6))
    gramian = gradients @ gradients.T
    np.testing.assert_array_equal(cagrad(gramian, 0.0), np.full(3, 1 / 3))
    plain = cagrad(gramian, 0.5)
    np.testing.assert_allclose(cagrad(gramian, 0.5, rescale="square"), plain / 1.25)
    np.testing.assert_allclose(cagrad(gramian, 0.5, rescale="linear"), plain / 1.5)


# TorchJD has some of them


def _tensor(gramian: np.ndarray) -> torch.Tensor:
    return torch.tensor(gramian, dtype=torch.float64)


def test_frank_wolfe_is_the_one_of_torchjd():
    aggregation = pytest.importorskip("torchjd.aggregation")
    weighting = aggregation.MGDAWeighting(epsilon=1e-300, max_iters=30)
    for tasks in TASKS[1:]:
        gradients = _rng(tasks).standard_normal((tasks, 50))
        gramian = gradients @ gradients.T
        weights = min_norm_frank_wolfe(gramian, iterations=30, tolerance=0.0)
        np.testing.assert_allclose(weights, weighting(_tensor(gramian)).numpy(), atol=1e-12)


def test_pcgrad_imtl_g_and_gradvac_are_those_of_torchjd():
    aggregation = pytest.importorskip("torchjd.aggregation")
    gradvac_there, goals = aggregation.GradVacWeighting(beta=0.5, eps=0.0), np.zeros((4, 4))
    for case in range(20):
        gradients = _rng(case).standard_normal((4, 9))
        gramian = gradients @ gradients.T
        expected = aggregation.IMTLGWeighting()(_tensor(gramian)).numpy()
        np.testing.assert_allclose(imtl_g(gramian), expected, rtol=1e-9)
        with torch.random.fork_rng():
            torch.manual_seed(case)
            expected = aggregation.PCGradWeighting()(_tensor(gramian)).numpy()
            torch.manual_seed(case)
            order = torch.stack([torch.randperm(4) for _ in range(4)]).numpy()
            np.testing.assert_allclose(pcgrad(gramian, order), expected, rtol=1e-12)
            torch.manual_seed(case)
            expected = gradvac_there(_tensor(gramian)).numpy()
            torch.manual_seed(case)
            others = [np.delete(np.arange(4), i)[torch.randperm(3).numpy()] for i in range(4)]
        order = np.stack([np.append(row, i) for i, row in enumerate(others)])
        weights, observed = gradvac(gramian, order, goals)
        np.testing.assert_allclose(weights, expected, rtol=1e-9)
        goals = 0.5 * goals + 0.5 * observed


def test_cagrad_is_the_one_of_torchjd():
    pytest.importorskip("cvxpy")
    aggregation = pytest.importorskip("torchjd.aggregation")
    for case in range(10):
        gradients = _rng(case).standard_normal((4, 9))
        gramian = gradients @ gradients.T
        expected = aggregation.CAGradWeighting(c=0.5)(_tensor(gramian)).numpy()
        np.testing.assert_allclose(cagrad(gramian, 0.5), expected, rtol=1e-3)


# Wrong arguments, and the examples


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clean(np.ones((2, 3))), r"square matrix \[K, K\], got the shape \(2, 3\)"),
        (lambda: nash(np.eye(2), [1.0, 0.0]), "powers must be 2 positive numbers"),
        (lambda: nash(np.eye(2), [1.0]), "powers must be 2 positive numbers"),
        (lambda: nash_truncated(np.eye(2), [1.0, -1.0]), "previous must hold 2 weights"),
        (lambda: nash_truncated(np.eye(2), iterations=0), "iterations must be at least 1"),
        (lambda: min_norm_frank_wolfe(np.eye(2), iterations=0), "iterations must be at least 1"),
        (lambda: cagrad(np.eye(2), -0.1), "c must be a finite number of at least 0, got -0.1"),
        (lambda: cagrad(np.eye(2), rescale="sqare"), "Did you mean 'square'"),
        (lambda: pcgrad(np.eye(2), [[0, 1], [0, 0]]), "permutation of 0 to 1"),
        (lambda: pcgrad(np.eye(2), target=2), "index from 0 to 1, got 2"),
        (lambda: gradvac(np.eye(2), None, np.ones((2, 3))), r"goals must be finite numbers \[2, 2\]"),
        (lambda: gradvac(np.eye(2), None, np.full((2, 2), np.nan)), "goals must be finite numbers"),
        (lambda: gcs(np.eye(2), -1, weighted=True), "index from 0 to 1, got -1"),
        (lambda: arml_step(np.eye(2), 0, [1.0], 0.05), "a must hold 2 weights"),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_expected(call, message):
    with pytest.raises(ProblemError, match=message):
        call()


def test_the_examples_in_the_docstrings_run():
    attempted = 0
    for found in pkgutil.iter_modules(solvers.__path__, "forkmerge.methods.solvers."):
        result = doctest.testmod(importlib.import_module(found.name))
        assert result.failed == 0, found.name
        attempted += result.attempted
    assert attempted >= 8
