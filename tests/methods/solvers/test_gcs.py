"""GCS: the cosine with the target, or whether it is positive."""

from __future__ import annotations

import numpy as np

from forkmerge.methods.solvers import gcs
from gramians import FIXTURE, make_rng


def test_gcs_on_the_fixture():
    gramian = FIXTURE @ FIXTURE.T
    np.testing.assert_array_equal(gcs(gramian, 0, weighted=False) @ FIXTURE, [-2, -1])
    np.testing.assert_allclose(gcs(gramian, 0, weighted=True) @ FIXTURE, [-1.70711, -0.70711], atol=1e-5)
    np.testing.assert_allclose(gcs(gramian, 0, weighted=True)[1], 0.70711, atol=1e-5)


def test_weights_lie_between_0_and_1_and_the_targets_is_exactly_1_whatever_rounding_does():
    for case in range(200):
        rng = make_rng(case)
        direction = rng.standard_normal(3)
        gradients = np.outer(rng.uniform(0.1, 10, 4), direction)  # parallel: all cosines are 1, but for rounding
        gradients[3] *= -1
        weights = gcs(gradients @ gradients.T, 1, weighted=True)
        assert weights[1] == 1
        assert weights.max() == 1
        np.testing.assert_allclose(weights, [1, 1, 1, 0], rtol=1e-12)
        np.testing.assert_array_equal(gcs(gradients @ gradients.T, 1, weighted=False), [1, 1, 1, 0])


def test_an_orthogonal_gradient_does_not_agree():
    for weighted in (True, False):
        np.testing.assert_array_equal(gcs(np.eye(2), 0, weighted=weighted), [1, 0])
