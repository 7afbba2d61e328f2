"""GCS: auxiliary gradients enter as far as they agree with the target's."""

from __future__ import annotations

from typing import Any

import numpy as np

from forkmerge.methods.solvers._gramian import Vector, check_target, clean


def gcs(gramian: Any, target: int, weighted: bool) -> Vector:
    """Return 1 for the target and, for each auxiliary, max(0, cos(g_target, g_k)) or 1[cos > 0].

    Args:
        gramian: G [K, K].
        target: Index of the target.
        weighted: True gives the cosine itself, False the indicator.

    Returns:
        w [K]. The cosine with a zero or non-finite gradient counts as 0; without a usable gradient of the target
        all weights are 0, because nothing agrees with it.

    Example:
        >>> gcs([[1.0, 1.0, -1.0], [1.0, 2.0, -0.5], [-1.0, -0.5, 1.25]], target=0, weighted=True).round(5).tolist()
        [1.0, 0.70711, 0.0]

    References:
        Du et al. (2018), "Adapting Auxiliary Losses Using Gradient Similarity", the weighted and the
        unweighted version.
    """
    matrix, bad = clean(gramian)
    check_target(target, len(matrix))
    weights: Vector = (matrix[target] > 0).astype(np.float64)
    if weighted:
        norms = np.sqrt(matrix.diagonal())
        norms[bad] = 1.0
        weights = np.clip(matrix[target] / norms / norms[target], 0.0, 1.0)
    if weights[target] > 0:
        weights[target] = 1.0  # the square root need not give exactly 1
    return weights
