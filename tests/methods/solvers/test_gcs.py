"""GCS: the cosine with the target, or whether it is positive."""

from __future__ import annotations

import numpy as np

from forkmerge.methods.solvers import (
    gcs,
)
from gramians import FIXTURE


def test_gcs_on_the_fixture():
    gramian = FIXTURE @ FIXTURE.T
    np.testing.assert_array_equal(gcs(gramian, 0, weighted=False) @ FIXTURE, [-2, -1])
    np.testing.assert_allclose(gcs(gramian, 0, weighted=True) @ FIXTURE, [-1.70711, -0.70711], atol=1e-5)
    np.testing.assert_allclose(gcs(gramian, 0, weighted=True)[1], 0.70711, atol=1e-5)
