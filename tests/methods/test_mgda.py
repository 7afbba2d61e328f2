"""MGDA: the shortest convex combination, exact or truncated, of gradients normalised or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import forkmerge as fm
from forkmerge.methods import MGDA
from forkmerge.testing import MethodConformance
from method_steps import GRADIENTS, assert_first_direction, step, view


def test_the_truncated_mgda_comes_near() -> None:
    np.testing.assert_allclose(-step(MGDA(solver="frank_wolfe"))[0], (-1 / 17, -4 / 17), atol=0.01)


def test_mgda_may_normalise() -> None:
    """With unit gradients the weights do not depend on the scale of a task."""
    gramian, scale = GRADIENTS @ GRADIENTS.T, np.array([1.0, 10.0, 0.1])
    plain = MGDA(normalize="l2").weights(gramian, view([1.0] * 3), {})
    scaled = MGDA(normalize="l2").weights(gramian * scale * scale[:, None], view([1.0] * 3), {})
    np.testing.assert_allclose(plain, scaled, rtol=1e-9)
    by_loss = MGDA(normalize="loss").weights(gramian * scale * scale[:, None], view(scale), {})
    np.testing.assert_allclose(by_loss, MGDA().weights(gramian, view([1.0] * 3), {}), rtol=1e-9)


class TestMGDA(MethodConformance):
    method = MGDA


def test_the_direction_of_the_first_step() -> None:
    assert_first_direction(MGDA(), (-1 / 17, -4 / 17))  # the nearest point to 0 between g_m and g_b


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "l1"}, "normalize must be none, l2, loss or loss\\+, got 'l1'"),
        ({"solver": "fast"}, "solver must be exact or frank_wolfe, got 'fast'"),
    ],
)
def test_wrong_options_are_refused_when_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        MGDA(**options)
