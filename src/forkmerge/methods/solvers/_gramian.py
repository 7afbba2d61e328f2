"""What every solver does with a Gramian first: find the unusable tasks, and divide the norms out."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from forkmerge.errors import ProblemError

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]
Indices = NDArray[np.intp]

EPSILON = float(np.finfo(np.float64).eps)
# Below the smallest normal number a square has lost its digits: such a gradient counts as zero.
_SMALLEST_SQUARE = float(np.finfo(np.float64).tiny)

STATIONARY = 1e-10
"""A convex combination of unit gradients whose squared norm is below this counts as zero.

Its length, 1e-5, is well above what rounding leaves of a zero in float64 and in Gramians of float32 gradients
summed in float64, and below what a method could still use: the weights there reach 1e5 in units of 1/‖g_i‖.
"""


def clean(gramian: Any) -> tuple[Matrix, Indices]:
    """Return the Gramian with unusable tasks zeroed, and the indices of these tasks.

    A task is unusable if its gradient is zero (also: so small that its square is no normal float64) or not finite.
    A non-finite g_i shows on the diagonal; it also spoils its whole row and column, which says nothing against
    the other tasks. Only where finite diagonals meet in a non-finite product are both tasks reported.

    Args:
        gramian: G [K, K] with G_ij = ⟨g_i, g_j⟩, symmetric; anything `numpy.asarray` reads.

    Returns:
        G as float64 with zeros in the rows and columns of unusable tasks, and their indices in increasing order.
        The argument itself comes back, uncopied, if it was float64 and nothing is wrong with it.

    Example:
        >>> import numpy as np
        >>> clean([[4.0, 0.0, np.nan], [0.0, 0.0, np.nan], [np.nan, np.nan, np.nan]])[1].tolist()
        [1, 2]
    """
    matrix: Matrix = np.asarray(gramian, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ProblemError(f"a Gramian must be a square matrix [K, K], got the shape {matrix.shape}.")
    finite = np.isfinite(matrix)
    usable = matrix.diagonal() >= _SMALLEST_SQUARE  # NaN is not
    if finite.all() and usable.all():
        return matrix, np.zeros(0, dtype=np.intp)
    usable &= finite.diagonal()
    usable &= finite[:, usable].all(axis=1)
    return np.where(np.outer(usable, usable), matrix, 0.0), np.flatnonzero(~usable)


def normalise(gramian: Any) -> tuple[Matrix, Vector, Indices]:
    """Return the cosines C [k, k], the norms [k] and the indices of the k usable tasks."""
    matrix, bad = clean(gramian)
    kept = np.arange(len(matrix))
    if len(bad):
        kept = np.delete(kept, bad)
        matrix = matrix[np.ix_(kept, kept)]
    norms = np.sqrt(matrix.diagonal())
    return matrix / norms / norms[:, None], norms, kept


def solve(matrix: Matrix, right: Matrix) -> Matrix:
    """Solve a linear system, in the least-squares sense if it is exactly singular."""
    try:
        return cast(Matrix, np.linalg.solve(matrix, right))
    except np.linalg.LinAlgError:
        return cast(Matrix, np.linalg.lstsq(matrix, right, rcond=None)[0])


def spread(weights: Vector, kept: Indices, tasks: int) -> Vector:
    """Return weights [tasks] with the given ones at `kept` and 0 elsewhere."""
    if len(weights) == tasks:
        return weights
    everywhere = np.zeros(tasks)
    everywhere[kept] = weights
    return everywhere


def check_target(target: int, tasks: int) -> int:
    """Return the target's index if it names one of the tasks."""
    if not 0 <= target < tasks:
        raise ProblemError(f"the target must be an index from 0 to {tasks - 1}, got {target}.")
    return target
