"""OL-AUX: weights that follow the inner products of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import forkmerge as fm
from forkmerge.methods import OL_AUX
from forkmerge.testing import MethodConformance
from method_steps import GRADIENTS, assert_first_direction, step, view


def test_ol_aux_adds_inner_products() -> None:
    _, own, _ = step(OL_AUX(every=1, beta=1.0), lr=0.1)
    np.testing.assert_allclose(own["weights"], [1.0, 1.1, 0.9], rtol=1e-12)


def test_ol_aux_waits_for_its_interval() -> None:
    _, own, _ = step(OL_AUX(), lr=0.0, steps=4)
    assert own["weights"] == [1.0, 1.0, 1.0]


def test_ol_aux_of_the_authors_adds_cosines() -> None:
    method = OL_AUX.authors_scripts()
    state = method.start(view([1.0] * 3).setup)
    gramian = GRADIENTS @ GRADIENTS.T
    for at in range(5):
        method.weights(gramian, view([1.0] * 3, at), state)
    np.testing.assert_allclose(state["weights"], [1.0, 1.00035355, 0.99955279], atol=1e-8)


class TestOL_AUX(MethodConformance):
    method = OL_AUX


def test_the_first_step_is_the_sum() -> None:
    assert_first_direction(OL_AUX(), (-1.0, -1.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a positive integer, got 0"),
    ],
)
def test_wrong_options_are_refused_when_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        OL_AUX(**options)
