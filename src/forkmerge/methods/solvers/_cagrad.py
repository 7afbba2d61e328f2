"""CAGrad: the best worst-case improvement within a ball around the average gradient, exactly."""

from __future__ import annotations

from math import nan, sqrt
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from forkmerge.errors import ProblemError, unknown_name
from forkmerge.methods.solvers._gramian import EPSILON, STATIONARY, Matrix, Vector, normalise, solve, spread
from forkmerge.methods.solvers._quadratic import Mask, solve_nonnegative

Rescale = Literal["none", "square", "linear"]
"""What CAGrad's direction is divided by: 1, 1 + c² or 1 + c (0, 1 and 2 in the authors' code)."""

# Each round halves the bracket at worst; ordinary Gramians need one or two.
_ROUNDS = 100


def cagrad(gramian: Any, c: float = 0.4, rescale: Rescale = "none") -> Vector:
    """Return the weights of the direction that improves the worst task most, near the average gradient (CAGrad).

    max over ‖d − g_0‖ ≤ c‖g_0‖ of min_i ⟨g_i, d⟩, with g_0 the average of the gradients. Its dual minimises
    ⟨g_w, g_0⟩ + c‖g_0‖‖g_w‖ over the simplex, and d = g_0 + c‖g_0‖/‖g_w‖ g_w. Written for u = c‖g_0‖/‖g_w‖ w ≥ 0 the
    optimum reads: all ⟨g_i, d⟩ ≥ μ, equal where u_i > 0, and ‖Σ u_i g_i‖ = c‖g_0‖. For a given μ that is a
    non-negative quadratic programme, and on a given face μ is the root of a quadratic, so the solution is exact once
    the face is found.

    Args:
        gramian: G [K, K].
        c: Radius of the ball in units of ‖g_0‖; 0 is the average gradient. 0.4 as in the authors' code.
        rescale: "none" is the paper; the authors' code divides d by 1 + c² ("square") in its multi-task runs.

    Returns:
        The weights of d [K]. Where zero is a convex combination of the gradients, and the ball reaches directions that
        no task opposes, g_w is zero and the dual says nothing about d: it is then the nearest of these
        directions to g_0. If g_0 is zero the weights are those of g_0. All zeros if no task is usable.

    Example:
        >>> cagrad([[1.0, 0.0], [0.0, 1.0]], c=0.5).round(12).tolist()
        [0.75, 0.75]

    Note:
        The authors' code adds 1e-8 to norms and stops a general solver at its default tolerance.

    References:
        Liu et al. (2021), "Conflict-Averse Gradient Descent for Multi-task Learning", Algorithm 1.
    """
    if not 0 <= c < float("inf"):
        raise ProblemError(f"c must be a finite number of at least 0, got {c}.")
    if rescale not in get_args(Rescale):
        raise ProblemError(unknown_name("rescale", rescale, get_args(Rescale)))
    divisor = {"none": 1.0, "square": 1 + c * c, "linear": 1 + c}[rescale]
    cosines, norms, kept = normalise(gramian)
    tasks = len(kept)
    if not tasks:
        return np.zeros(len(gramian))
    norms = norms / norms.max()
    slopes = cosines @ norms / tasks  # ⟨ĝ_i, g_0⟩
    square = float(norms @ slopes) / tasks  # ‖g_0‖²
    weights = np.full(tasks, 1.0 / tasks)
    if c > 0 and square > 4 * EPSILON * float(norms.sum()) ** 2 / tasks:
        cosines.flat[:: tasks + 1] += tasks * EPSILON  # keeps faces of dependent gradients solvable
        weights += _Ball(cosines, norms.min() / norms, slopes, c * c * square).solve() / norms
    return spread(weights / divisor, kept, len(gramian))


class _Ball(NamedTuple):
    """Find v ≥ 0 with vᵀCv = `square`, Cv + slopes ≥ μ·shares and equality where v > 0."""

    cosines: Matrix
    shares: Vector
    slopes: Vector
    square: float

    def solve(self) -> Vector:
        """Return v: on the face of all tasks if it is non-negative there, and by search otherwise."""
        everywhere: Mask = np.ones(len(self.shares), dtype=np.bool_)
        level, solution = self.on_face(everywhere)
        if not solution.min() >= 0:
            level, solution = self.search(everywhere)
        if level > 0 and self.square < STATIONARY * float(solution.sum()) ** 2:
            solution, _ = solve_nonnegative(self.cosines, -self.slopes, everywhere)
        return solution

    def search(self, passive: Mask) -> tuple[float, Vector]:
        """Return μ and v by finding the face.

        ½v(μ)ᵀCv(μ) of the programme's solution at a given μ is convex and increasing in μ. The quadratic of the face
        reached so far gives the next μ, and a bracket takes over where that leaves it.
        """
        low = float((self.slopes / self.shares).min())
        high = float(((self.slopes + np.sqrt(self.square)) / self.shares).min())
        rounding = 16 * EPSILON * max(abs(low), abs(high))  # a vertex of the simplex lies on an end of the bracket
        level, solution = low, np.zeros_like(self.shares)
        for _ in range(_ROUNDS):
            root, _ = self.on_face(passive)
            level = root if low - rounding <= root <= high + rounding else (low + high) / 2
            before = passive
            solution, passive = solve_nonnegative(self.cosines, level * self.shares - self.slopes, passive)
            if level == root and (passive == before).all():
                break
            missing = self.square - float(solution @ self.cosines @ solution)
            if abs(missing) <= 4 * EPSILON * self.square or high - low <= rounding:
                break
            low, high = (level, high) if missing > 0 else (low, level)
        return level, solution

    def on_face(self, passive: Mask) -> tuple[float, Vector]:
        """Return the larger μ at which v = C⁻¹(μ·shares − slopes) on the face has vᵀCv = square; NaN if none has."""
        free = passive.nonzero()[0]
        face = self.cosines[free[:, None], free] if len(free) < len(passive) else self.cosines
        sides = np.array([self.shares[free], self.slopes[free]])
        solved = solve(face, sides.T)
        (rise, cross), (_, fall) = (sides @ solved).tolist()
        under = cross * cross - rise * (fall - self.square)
        level = (cross + sqrt(under)) / rise if under >= 0 and rise > 0 else nan
        return level, level * solved[:, 0] - solved[:, 1]
