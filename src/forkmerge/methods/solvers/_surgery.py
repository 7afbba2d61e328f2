"""PCGrad and GradVac: gradients corrected against one another, as coefficients instead of vectors.

Both keep, for every task i, the coefficients of its corrected gradient in unit gradients, g_i'/‖g_i‖ = Σ_j W_ij ĝ_j,
and its inner products with the unit gradients, P = WC. The tasks do not see each other's corrections, so all take
their t-th correction at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkmerge.errors import ProblemError
from forkmerge.methods.solvers._gramian import Indices, Matrix, Vector, check_target, clean

# Goals nearer to ±1 than this would need corrections without bound.
_LARGEST_GOAL = 1 - 1e-8
# The squared length below which what is left of a unit gradient after its corrections is rounding, without direction.
_VANISHED = 1e-13


def pcgrad(gramian: Any, order: Any = None, target: int | None = None) -> Vector:
    """Return the weights of the sum of gradients after PCGrad's projections.

    For each task i and each other task j in the order of row i: if ⟨g_i', g_j⟩ < 0 then
    g_i' −= ⟨g_i', g_j⟩/‖g_j‖² g_j, with g_j the gradient as computed. The direction is Σ_i g_i'.

    With a target only the auxiliaries are projected, and only on the normal plane of the target's gradient: the
    direction is g_m + Σ_k (g_k − min(0, ⟨g_k, g_m⟩)/‖g_m‖² g_m), and no order is needed.

    Args:
        gramian: G [K, K].
        order: [K, K], row i a random permutation of the tasks, in which i itself is passed over. None visits the
            tasks in their own order.
        target: Index of the target, for the target-aware form.

    Returns:
        w [K]. Without conflicts, and without a usable gradient of the target, all usable tasks get 1.

    Example:
        >>> pcgrad([[1.0, -1.0], [-1.0, 4.0]]).tolist()
        [2.0, 1.25]

    References:
        Yu et al. (2020), "Gradient Surgery for Multi-Task Learning", Algorithm 1. The target-aware form: the
        auxiliary-learning reading of it, as in the ForkMerge paper's comparison.
    """
    cosines, norms, usable = _unit(gramian)
    corrections = np.diag(usable.astype(np.float64))  # W
    if target is not None:
        check_target(target, len(norms))
        corrections[:, target] -= np.minimum(cosines[:, target], 0.0)
        return _sum_of_rows(corrections, norms, usable)
    products = cosines.copy()  # P
    tasks = np.arange(len(norms))
    for others in _visits(order, len(norms)):
        shift = np.maximum(-products[tasks, others], 0.0)
        corrections[tasks, others] += shift
        products += shift[:, None] * cosines[others]
    return _sum_of_rows(corrections, norms, usable)


def gradvac(gramian: Any, order: Any, goals: Any, target: int | None = None) -> tuple[Vector, Matrix]:
    """Return the weights of the sum of gradients after GradVac's corrections, and the cosines it met.

    For each task i and each other task j in the order of row i, with φ the cosine of g_i' and g_j and φ̂ = goals[i, j]:
    if φ < φ̂ then g_i' += ‖g_i'‖ (φ̂ √(1−φ²) − φ √(1−φ̂²)) / (‖g_j‖ √(1−φ̂²)) g_j, after which the cosine is φ̂. With
    goals of 0 this is PCGrad. With a target only auxiliaries are corrected, and only towards the target's gradient.

    The goals are the caller's state: φ̂ ← (1−β) φ̂ + β φ with the returned cosines after every step. Each pair is
    met once, so updating all goals at the end is the same as updating them on the way.

    Args:
        gramian: G [K, K].
        order: As for `pcgrad`.
        goals: φ̂ [K, K], held to the range ±(1 − 1e-8): a goal of 1 would need an infinite correction.
        target: Index of the target, for the target-aware form.

    Returns:
        w [K], and φ [K, K]; pairs that were not met (the diagonal, unusable tasks, gradients that were corrected to
        zero, with a target all pairs but auxiliary and target) hold their goal, so that the average leaves them.

    References:
        Wang et al. (2021), "Gradient Vaccine: Investigating and Improving Multi-task Optimization in Massively
        Multilingual Models", the rule with adaptive goals.
    """
    cosines, norms, usable = _unit(gramian)
    observed: Matrix = np.array(goals, dtype=np.float64)
    if observed.shape != cosines.shape or not np.isfinite(observed).all():
        raise ProblemError(f"goals must be finite numbers [{len(norms)}, {len(norms)}], got {observed.tolist()}.")
    corrections = np.diag(usable.astype(np.float64))  # W
    products = cosines.copy()  # P
    tasks = np.arange(len(norms))
    if target is None:
        visits = _visits(order, len(norms))
    else:
        visits = np.full((1, len(norms)), check_target(target, len(norms)))
    meeting = usable & usable[visits] & (visits != tasks)
    seen = observed[tasks, visits]
    bounded = np.minimum(np.maximum(seen, -_LARGEST_GOAL), _LARGEST_GOAL)
    tangents = bounded / np.sqrt(1 - bounded * bounded)  # φ̂/√(1−φ̂²)
    squares = np.ones(len(norms))  # ‖g_i'‖²
    for turn, others in enumerate(visits):
        along = products[tasks, others]  # ‖g_i'‖ φ
        met = meeting[turn] & (squares > _VANISHED)
        cosine = np.minimum(np.maximum(along / np.sqrt(np.where(met, squares, 1.0)), -1.0), 1.0)
        sine = np.sqrt(squares * (1 - cosine * cosine))  # ‖g_i'‖ √(1−φ²)
        shift = np.where(met & (cosine < bounded[turn]), tangents[turn] * sine - along, 0.0)
        seen[turn] = np.where(met, cosine, seen[turn])
        corrections[tasks, others] += shift
        products += shift[:, None] * cosines[others]
        squares = np.maximum(squares + shift * (2 * along + shift), 0.0)
    observed[tasks, visits] = seen
    return _sum_of_rows(corrections, norms, usable), observed


def _unit(gramian: Any) -> tuple[Matrix, Vector, NDArray[np.bool_]]:
    matrix, bad = clean(gramian)
    norms = np.sqrt(matrix.diagonal())
    usable = np.ones(len(norms), dtype=np.bool_)
    usable[bad] = False
    norms[bad] = 1.0
    return matrix / norms / norms[:, None], norms, usable


def _sum_of_rows(corrections: Matrix, norms: Vector, usable: NDArray[np.bool_]) -> Vector:
    return np.where(usable, norms @ corrections / norms, 0.0)


def _visits(order: Any, tasks: int) -> Indices:
    """Return [K − 1, K]: whom each task meets in its first, second … correction."""
    own = np.arange(tasks)
    if order is None:
        order = np.broadcast_to(own, (tasks, tasks))
    rows: Indices = np.asarray(order, dtype=np.intp)
    if rows.shape != (tasks, tasks) or (np.sort(rows, axis=1) != own).any():
        raise ProblemError(f"order must hold a permutation of 0 to {tasks - 1} for each of the {tasks} tasks.")
    others: Indices = rows[rows != own[:, None]].reshape(tasks, tasks - 1).T
    return others
