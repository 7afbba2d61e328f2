"""Nash-MTL: the bargaining solution, clipped and used for several steps where asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import forkmerge as fm
from forkmerge.methods import Method, NashMTL
from forkmerge.methods._nash import clipped
from forkmerge.testing import MethodConformance
from method_steps import step, view


class TestTruncatedNashMTL(MethodConformance):
    def make(self) -> Method:
        return NashMTL(solver="truncated", every=2, max_norm=1.0)


def test_nash_solves_g_a_equals_one_over_a() -> None:
    theta, own, _ = step(NashMTL(), {"m": (2.0, 0.0), "a": (0.0, 0.5)})
    np.testing.assert_allclose(own["weights"], [0.5, 2.0], rtol=1e-12)
    np.testing.assert_allclose(theta, [1.0, 1.0], rtol=1e-12)


def test_nash_may_clip_its_direction() -> None:
    theta, _, _ = step(NashMTL(max_norm=1.0), {"m": (2.0, 0.0), "a": (0.0, 0.5)})
    assert np.linalg.norm(theta) == pytest.approx(1.0)


def test_nash_may_use_its_weights_for_several_steps() -> None:
    method = NashMTL(every=2)
    state = method.start(view([1.0, 1.0]).setup)
    seen = [method.weights(np.diag([4.0**k, 0.25]), view([1.0, 1.0], k), state).tolist() for k in range(4)]
    assert seen[0] == seen[1] != seen[2] == seen[3]


class TestNashMTL(MethodConformance):
    method = NashMTL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a positive integer, got 0"),
        ({"solver": "cvxpy"}, "solver must be exact or truncated, got 'cvxpy'"),
    ],
)
def test_wrong_options_are_refused_when_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        NashMTL(**options)


class TestAuthorsScripts(MethodConformance):
    """Truncated, clipped at 1, heads weighted."""

    def make(self) -> Method:
        return NashMTL.authors_scripts()

    def test_the_direction_is_clipped_at_one_and_heads_have_the_weights_before(self) -> None:
        method = NashMTL.authors_scripts()
        state = method.start(view([1.0, 1.0]).setup)
        weights = method.weights(np.diag([4.0, 0.25]), view([1.0, 1.0]), state)  # G a = 1/a: a = (½, 2), length √2
        np.testing.assert_allclose(weights, np.array([0.5, 2.0]) / np.sqrt(2), rtol=1e-3)
        np.testing.assert_allclose(method.head_weights(weights, view([1.0, 1.0]), state), [0.5, 2.0], rtol=1e-3)

    def test_a_short_direction_is_not_lengthened(self) -> None:
        gramian, short = np.diag([4.0, 0.25]), np.array([0.1, 0.2])
        np.testing.assert_array_equal(clipped(short, gramian, 1.0), short)
