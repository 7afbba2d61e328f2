"""ARML: one step of the weights, their shift and their clamp."""

from __future__ import annotations

import numpy as np

from forkmerge.methods.solvers import arml_step
from gramians import FIXTURE


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
