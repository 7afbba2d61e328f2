"""IMTL-G: the direction with equal projections on all unit gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from forkmerge.methods.solvers._gramian import STATIONARY, Vector, normalise, spread

# Eigenvalues of the cosines below this share of the largest are what rounding left of a zero.
_RANK = 1e-11


def imtl_g(gramian: Any) -> Vector:
    """Return the weights of the direction with equal projections on all unit gradients (IMTL-G).

    Σw = 1 and ⟨Σ w_j g_j, g_i⟩/‖g_i‖ equal for all i. With v_i = w_i‖g_i‖ that is Cv ∝ 1, so w ∝ (C⁻¹1)_i/‖g_i‖.
    Weights may be negative.

    Args:
        gramian: G [K, K].

    Returns:
        w [K] with Σw = 1. Where C is singular (dependent gradients), v = C⁺1: the projections are then equal if they
        can be and as nearly equal as possible, in the least-squares sense, otherwise. Where only the direction zero
        has equal projections (the unit gradients add up to it, as opposite ones do), w ∝ 1/‖g_i‖ gives that one. Where
        the w cannot be scaled to sum to 1 because they sum to zero, Σ|w| = 1. All zeros if no task is usable.

    Example:
        >>> imtl_g([[1.0, 0.0], [0.0, 4.0]]).round(12).tolist()
        [0.666666666667, 0.333333333333]

    Note:
        For more tasks than dimensions the paper's closed form has only the direction zero; the pseudo-inverse keeps a
        useful one.

    References:
        Liu et al. (2021), "Towards Impartial Multi-task Learning", the closed form of gradient balance.
    """
    cosines, norms, kept = normalise(gramian)
    if not len(kept):
        return np.zeros(len(gramian))
    values, vectors = np.linalg.eigh(cosines)
    regular = values > _RANK * values[-1]
    vectors = vectors[:, regular]
    sums = vectors.sum(axis=0)  # of the projections that some direction can have, how much of 1 they hold
    if float(sums @ sums) > STATIONARY * len(kept):
        scaled = vectors @ (sums / values[regular])
    else:
        scaled = np.ones(len(kept))
    weights = scaled * (norms.min() / norms)
    total, size = weights.sum(), np.abs(weights).sum()
    return spread(weights / (total if abs(total) > STATIONARY * size else size), kept, len(gramian))
