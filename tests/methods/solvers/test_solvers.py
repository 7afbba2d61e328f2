"""What holds for every solver: scales, norms, unusable tasks, rounding, wrong arguments, examples."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Callable

import numpy as np
import pytest

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
from gramians import make_orders, make_rng

_ORDER = make_orders(make_rng(5), 5)
_GOALS = make_rng(6).uniform(-0.2, 0.6, (5, 5))
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
    gradients = make_rng(7).standard_normal((5, 9))
    gramian = gradients @ gradients.T
    expected = SOLVERS[name](gramian)
    for exponent in (-150, -8, -3, 4, 8, 150):  # squares near both ends of what float64 holds
        scale = 10.0**exponent
        weights = SOLVERS[name](gramian * scale**2)
        if name.startswith("nash"):  # its direction has a fixed length
            weights = weights * scale
        np.testing.assert_allclose(weights, expected, rtol=1e-9)


@pytest.mark.parametrize("name", SOLVERS)
def test_whole_numbers_and_lists_are_read_as_real_numbers(name):
    gramian = [[9, 2, -1, 0, 1], [2, 4, 1, -1, 0], [-1, 1, 5, 2, 0], [0, -1, 2, 8, 1], [1, 0, 0, 1, 3]]
    weights = SOLVERS[name](gramian)
    assert weights.dtype == np.float64
    np.testing.assert_array_equal(weights, SOLVERS[name](np.array(gramian, dtype=np.float64)))


def test_other_arguments_may_be_whole_numbers():
    gramian = [[4.0, -1.0], [-1.0, 1.0]]
    for values in ([1, 1], np.array([1.0, 1.0], dtype=np.float32)):
        assert arml_step(gramian, 0, values, lr=0.05).tolist() == arml_step(gramian, 0, np.ones(2), lr=0.05).tolist()
        assert arml_step([[0.0]], 0, values[:1], lr=0.05).dtype == np.float64
        assert nash(gramian, values).tolist() == nash(gramian).tolist()
        assert nash_truncated(gramian, values).tolist() == nash_truncated(gramian).tolist()
        assert nash_jacobian(gramian, values).tolist() == nash_jacobian(gramian, np.ones(2)).tolist()
    weights, cosines = gradvac(gramian, [[0, 1], [1, 0]], [[0, 0], [0, 0]])
    assert weights.tolist() == gradvac(gramian, [[0, 1], [1, 0]], np.zeros((2, 2)))[0].tolist()
    assert cosines.tolist() == [[0.0, -0.5], [-0.5, 0.0]]


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
        rng = make_rng(case)
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
        extra = (cagrad(gramian, 0.4) - 0.25) * norms / norms.max()
        average = norms / norms.max() / 4
        radius = 0.4 * np.sqrt(average @ cosines @ average)
        np.testing.assert_allclose(np.sqrt(extra @ cosines @ extra), radius, rtol=1e-6)


def test_gramians_of_rounded_float32_gradients_give_finite_weights():
    for case in range(20):
        rng = make_rng(case)
        gradients = rng.standard_normal((4, 500)).astype(np.float32)
        gradients[1] = -gradients[0]
        gradients[3] = gradients[2]
        gramian = (gradients @ gradients.T).astype(np.float64)
        gramian *= 1 + 1e-7 * rng.standard_normal(gramian.shape)  # not even symmetric any more
        for solver in (min_norm, min_norm_frank_wolfe, nash, nash_truncated, cagrad, imtl_g, pcgrad):
            assert np.isfinite(solver(gramian)).all(), solver.__name__
        assert np.linalg.norm(min_norm(gramian) @ gradients) < 0.01 * np.linalg.norm(gradients[0])


@pytest.mark.parametrize("name", SOLVERS)
def test_a_zero_or_non_finite_gradient_gets_weight_zero_and_the_others_do_not_notice(name):
    gradients = make_rng(8).standard_normal((5, 9))
    gradients[3] = 0.0
    gramian = gradients @ gradients.T
    expected = SOLVERS[name](gramian)
    assert expected[3] == 0
    assert np.isfinite(expected).all()
    assert (expected != 0).any()
    if "vac" not in name and "pcgrad" not in name:
        rest = np.delete(np.delete(gramian, 3, 0), 3, 1)
        np.testing.assert_allclose(np.delete(expected, 3), SOLVERS[name](rest), rtol=1e-12)
    for value in (np.nan, np.inf):
        gramian[3] = gramian[:, 3] = value
        np.testing.assert_array_equal(SOLVERS[name](gramian), expected)


@pytest.mark.parametrize("name", SOLVERS)
def test_without_any_usable_gradient_all_weights_are_zero(name):
    for value in (0.0, np.nan):
        np.testing.assert_array_equal(SOLVERS[name](np.full((5, 5), value)), np.zeros(5))


def test_an_unusable_target_stops_gcs_and_leaves_target_aware_surgery_without_corrections():
    gradients = make_rng(9).standard_normal((5, 9))
    gradients[0] = 0
    gramian = gradients @ gradients.T
    np.testing.assert_array_equal(gcs(gramian, 0, weighted=True), np.zeros(5))
    np.testing.assert_array_equal(pcgrad(gramian, target=0), [0, 1, 1, 1, 1])
    np.testing.assert_array_equal(gradvac(gramian, None, _GOALS, target=0)[0], [0, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clean(np.ones((2, 3))), r"square matrix \[K, K\], got the shape \(2, 3\)"),
        (lambda: nash(np.eye(2), [1.0, 0.0]), "powers must be 2 positive numbers"),
        (lambda: nash(np.eye(2), [1.0]), "powers must be 2 positive numbers"),
        (lambda: nash_truncated(np.eye(2), [1.0, -1.0]), "previous must hold 2 weights"),
        (lambda: nash_truncated(np.eye(2), iterations=0), "iterations must be a positive integer"),
        (lambda: min_norm_frank_wolfe(np.eye(2), iterations=0), "iterations must be a positive integer"),
        (lambda: cagrad(np.eye(2), -0.1), "c must be a finite number of at least 0, got -0.1"),
        (lambda: cagrad(np.eye(2), np.inf), "c must be a finite number of at least 0, got inf"),
        (lambda: cagrad(np.eye(2), rescale="sqare"), "^unknown rescale 'sqare'. Did you mean 'square'"),
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
    for module in pkgutil.iter_modules(solvers.__path__, "forkmerge.methods.solvers."):
        result = doctest.testmod(importlib.import_module(module.name))
        assert result.failed == 0, module.name
        attempted += result.attempted
    assert attempted >= 8
