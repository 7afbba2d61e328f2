"""ARML: task weights that bring the auxiliary gradients' sum close to the target's gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from forkmerge.errors import ProblemError
from forkmerge.methods.solvers._gramian import Vector, check_target, clean


def arml_step(gramian: Any, target: int, a: Any, lr: float) -> Vector:
    """Return the auxiliary weights after one gradient step on ‖g_m − Σ_k a_k g_k‖², shift and clamp.

    d/da_k = −2⟨g_m − Σ_j a_j g_j, g_k⟩ = −2(G_mk − Σ_j G_kj a_j); then a_k −= lr·d/da_k; every a_k gets (A − Σa)/A for
    A auxiliaries, so that Σa = A; last, negative values become 0.

    Args:
        gramian: G [K, K], the target included.
        target: Index m of the target.
        a: The weights so far [K]; the target's own entry is ignored.
        lr: Learning rate of the weights; 0.05 in the authors' code.

    Returns:
        a [K], the target's entry 1: the task weights of the model's step. A zero or non-finite gradient moves
        nothing; since a is the method's state it keeps such a task's entry, and it is for the caller to leave that
        task out of this step. Without a usable gradient of the target a is only shifted and clamped.

    Example:
        >>> gramian = [[1.0, 1.0, -1.0], [1.0, 2.0, -0.5], [-1.0, -0.5, 1.25]]
        >>> arml_step(gramian, target=0, a=[1.0, 1.0, 1.0], lr=0.05).round(12).tolist()
        [1.0, 1.0625, 0.9375]

    Note:
        Like the authors' code it clamps after the shift, so Σa can exceed A until the next step.

    References:
        Shi et al. (2020), "Auxiliary Task Reweighting for Minimum-data Learning", Algorithm 1.
    """
    matrix, _ = clean(gramian)
    check_target(target, len(matrix))
    weights = np.array(a, dtype=np.float64)
    if weights.shape != (len(matrix),):
        raise ProblemError(f"a must hold {len(matrix)} weights, one per task, got the shape {weights.shape}.")
    auxiliaries = np.arange(len(weights)) != target
    if matrix[target, target] > 0:
        weights[target] = 0.0
        weights = weights + 2 * lr * (matrix[target] - matrix @ weights)
    if auxiliaries.any():
        weights = np.maximum(weights + (1.0 - weights[auxiliaries].mean()), 0.0)
    weights[target] = 1.0
    return weights
