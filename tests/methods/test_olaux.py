"""OL-AUX: weights that follow the inner products of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import forkmerge as fm
from forkmerge.methods import OL_AUX, Method
from forkmerge.testing import MethodConformance
from method_steps import GRADIENTS, assert_first_direction, step, view


def test_ol_aux_adds_inner_products() -> None:
    _, own, _ = step(OL_AUX(every=1, beta=1.0), lr=0.1)
    np.testing.assert_allclose(own["weights"], [1.0, 1.1, 0.9], rtol=1e-12)


def test_ol_aux_waits_for_its_interval() -> None:
    _, own, _ = step(OL_AUX(), lr=0.0, steps=4)
    assert own["weights"] == [1.0, 1.0, 1.0]


class TestAuthorsScripts(MethodConformance):
    """Cosines without α, β = 1e-4, N = 5, applied to the shared parameters alone."""

    def make(self) -> Method:
        return OL_AUX.authors_scripts()

    def test_every_fifth_step_uses_the_weights_it_has_moved(self) -> None:
        method = OL_AUX.authors_scripts()
        state = method.start(view([1.0] * 3).setup)
        used = [method.weights(GRADIENTS @ GRADIENTS.T, view([1.0] * 3, at), state) for at in range(6)]
        np.testing.assert_array_equal(used[:4], np.ones((4, 3)))
        for weights in used[4:]:
            np.testing.assert_allclose(weights, [1.0, 1.00035355, 0.99955279], atol=1e-8)

    def test_it_is_the_plain_formula_over_many_steps(self) -> None:
        method, draw = OL_AUX.authors_scripts(), np.random.default_rng(0)
        state = method.start(view([1.0] * 3).setup)
        weights, sums = np.ones(3), np.zeros(3)
        for at in range(12):
            rows = draw.normal(size=(3, 4))
            cosines = rows @ rows[0] / np.linalg.norm(rows, axis=1) / np.linalg.norm(rows[0])
            sums += 1e-4 * np.where(np.arange(3) == 0, 0.0, cosines)
            if at % 5 == 4:
                weights, sums = weights + sums, np.zeros(3)
            np.testing.assert_allclose(method.weights(rows @ rows.T, view([1.0] * 3, at), state), weights, rtol=1e-14)

    def test_heads_stay_as_they_are(self) -> None:
        weights = np.array([1.0, 2.0, 3.0])
        assert OL_AUX.authors_scripts().head_weights(weights, view([1.0] * 3), {}) is None
        assert OL_AUX().head_weights(weights, view([1.0] * 3), {}) is weights


class TestOL_AUX(MethodConformance):
    method = OL_AUX


def test_the_first_step_is_the_sum() -> None:
    assert_first_direction(OL_AUX(), (-1.0, -1.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a positive integer, got 0"),
        ({"applied": "never"}, "applied must be before or after, got 'never'"),
    ],
)
def test_wrong_options_are_refused_when_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        OL_AUX(**options)
