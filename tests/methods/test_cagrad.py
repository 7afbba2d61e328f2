"""CAGrad: the best worst-case improvement near the average gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import forkmerge as fm
from forkmerge.methods import CAGrad
from forkmerge.testing import MethodConformance
from method_steps import GRADIENTS, assert_first_direction, step


class TestCAGrad(MethodConformance):
    method = CAGrad


def test_the_direction_of_the_first_step() -> None:
    assert_first_direction(CAGrad(c=0.0), (-1 / 3, -0.5))  # no ball: the mean gradient


def test_the_step_is_the_best_worst_case_within_the_ball() -> None:
    """c = 0.5: nothing else as near to the mean gradient helps the worst-off task more."""
    mean = GRADIENTS.mean(0)
    way = -step(CAGrad(c=0.5))[0]
    radius = 0.5 * np.linalg.norm(mean)
    assert np.linalg.norm(way - mean) == pytest.approx(radius, rel=1e-6)
    angles = np.linspace(0, 2 * np.pi, 100_000)
    others = mean + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
    assert (GRADIENTS @ way).min() == pytest.approx((GRADIENTS @ others.T).min(0).max(), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"c": -1}, "c must be a finite number of at least 0, got -1"),
        ({"rescale": "cubic"}, "unknown rescale 'cubic'"),
    ],
)
def test_wrong_options_are_refused_when_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        CAGrad(**options)


def test_the_authors_scripts_take_half_the_mean_as_radius_and_rescale() -> None:
    """d = (g_0 + c‖g_0‖ g_w/‖g_w‖)/(1 + c²); g_w is the convex combination of least ⟨g_w, g_0⟩ + c‖g_0‖‖g_w‖."""
    mean = GRADIENTS.mean(0)
    radius = 0.5 * np.linalg.norm(mean)
    shares = np.stack(np.meshgrid(np.linspace(0, 1, 1001), np.linspace(0, 1, 1001)), -1).reshape(-1, 2)
    shares = shares[shares.sum(1) <= 1]
    mixed = np.column_stack([shares, 1 - shares.sum(1)]) @ GRADIENTS
    best = mixed[(mixed @ mean + radius * np.linalg.norm(mixed, axis=1)).argmin()]
    expected = (mean + radius * best / np.linalg.norm(best)) / 1.25
    np.testing.assert_allclose(-step(CAGrad.authors_scripts())[0], expected, atol=2e-3)
