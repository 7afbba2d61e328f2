"""The small quadratic programme behind MGDA and CAGrad, solved exactly by active sets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forkmerge.methods.solvers._gramian import EPSILON, Matrix, Vector, solve

Mask = NDArray[np.bool_]

# Exchanging all wrong signs at once nearly always ends within four or five solves; where it has not after these
# (singular matrices), the slow but monotone method takes over.
_EXCHANGES = 12
# Rounding of one product row, in units of the largest term.
_SLACK = 16 * EPSILON


def solve_nonnegative(hessian: Matrix, linear: Vector, passive: Mask) -> tuple[Vector, Mask]:
    """Minimise ½ vᵀQv − rᵀv over v ≥ 0; return v and where it is free to be positive.

    The solution is the v with v ≥ 0, Qv − r ≥ 0 and vᵀ(Qv − r) = 0. It is found on the face of the final
    `passive` set by one linear solve, hence to rounding precision and not to a tolerance.

    Args:
        hessian: Q [k, k], symmetric and positive definite up to rounding.
        linear: r [k].
        passive: The first guess of the coordinates that are positive; a good guess saves solves.

    References:
        Portugal, Júdice and Vicente (1994), "A comparison of block pivoting and interior-point algorithms for linear
        least squares problems with nonnegative variables", for the exchange of blocks; Lawson and Hanson (1974),
        "Solving Least Squares Problems", chapter 23, for the fallback.
    """
    for _ in range(_EXCHANGES):
        solution = _solve_on_face(hessian, linear, passive)
        if passive.all() and solution.min() >= 0:
            break
        slack = hessian @ solution - linear
        wrong = np.where(passive, solution < 0, slack < -_SLACK * _largest(solution, linear))
        if not wrong.any():
            break
        passive = passive ^ wrong
    else:
        return _solve_one_by_one(hessian, linear)
    return solution, passive


def _solve_one_by_one(hessian: Matrix, linear: Vector) -> tuple[Vector, Mask]:
    """The same by adding one coordinate at a time: the objective falls at every change, so nothing cycles."""
    solution = np.zeros_like(linear)
    passive = np.zeros(len(linear), dtype=np.bool_)
    useless = passive.copy()
    for _ in range(3 * len(linear) + 10):
        gain = np.where(passive | useless, -np.inf, linear - hessian @ solution)
        added = int(gain.argmax())
        if gain[added] <= _SLACK * _largest(solution, linear):
            break
        passive[added] = True
        face = _solve_on_face(hessian, linear, passive)
        if face[added] <= 0:  # the gain was rounding
            passive[added], useless[added] = False, True
            continue
        while (blocking := passive & (face <= 0)).any():
            step = (solution[blocking] / (solution[blocking] - face[blocking])).min()
            solution = solution + step * (face - solution)
            passive &= ~blocking | (solution > EPSILON * solution.max())
            solution[~passive] = 0.0
            face = _solve_on_face(hessian, linear, passive)
        solution = face
        useless[:] = False
    return solution, passive


def _solve_on_face(hessian: Matrix, linear: Vector, passive: Mask) -> Vector:
    free = passive.nonzero()[0]
    if len(free) == len(linear):
        return solve(hessian, linear)
    solution = np.zeros_like(linear)
    if len(free):
        solution[free] = solve(hessian[free[:, None], free], linear[free])
    return solution


def _largest(solution: Vector, linear: Vector) -> float:
    return float(np.abs(solution).max() + np.abs(linear).max())
