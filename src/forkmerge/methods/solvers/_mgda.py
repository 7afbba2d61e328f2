"""MGDA: the shortest convex combination of the gradients, exactly or by the original's truncated iteration."""

from __future__ import annotations

from typing import Any

import numpy as np

from forkmerge.errors import check_count
from forkmerge.methods.solvers._gramian import EPSILON, Vector, normalise, spread
from forkmerge.methods.solvers._quadratic import solve_nonnegative


def min_norm(gramian: Any) -> Vector:
    """Return the weights of the shortest vector in the convex hull of the gradients (MGDA).

    argmin wᵀGw over w ≥ 0, Σw = 1. By homogeneity w = u/Σu for the u ≥ 0 that minimises uᵀGu + γ(1ᵀu − 1)², whatever
    γ > 0; it is solved on its final face by one linear system. With u_i = v_i/‖g_i‖ and γ the smallest squared norm,
    its matrix is the cosines plus a rank-one term, whose condition does not depend on the norms. Where several
    weights give the same shortest vector (linearly dependent gradients), one of them is returned.

    This is the default form of MGDA; `min_norm_frank_wolfe` is the iteration that the method's paper truncates.

    Args:
        gramian: G [K, K].

    Returns:
        w [K], w ≥ 0, Σw = 1; at a Pareto-stationary point Σ w_i g_i = 0. All zeros if no task is usable.

    Example:
        >>> min_norm([[1.0, 0.0], [0.0, 3.0]]).round(12).tolist()
        [0.75, 0.25]

    Note:
        Taken literally, a task with gradient zero gets all the weight and training stops; here it is left out.

    References:
        Désidéri (2012), "Multiple-gradient descent algorithm"; Sener and Koltun (2018), "Multi-Task Learning as
        Multi-Objective Optimization", equation 3. The reduction: Wolfe (1976), "Finding the nearest point in a
        polytope".
    """
    cosines, norms, kept = normalise(gramian)
    if len(kept) < 2:
        return spread(np.ones(len(kept)), kept, len(gramian))
    shares = norms.min() / norms
    hessian = cosines + shares * shares[:, None]
    hessian.flat[:: len(kept) + 1] += len(kept) * EPSILON  # keeps faces of dependent gradients solvable
    solution, _ = solve_nonnegative(hessian, shares, np.ones(len(kept), dtype=np.bool_))
    weights = solution * shares
    return spread(weights / weights.sum(), kept, len(gramian))


def min_norm_frank_wolfe(gramian: Any, iterations: int = 250, tolerance: float = 1e-5) -> Vector:
    """Return the weights of `min_norm` as the original finds them: a truncated Frank-Wolfe iteration.

    From w = 1/K: pick the task t with the smallest (Gw)_t, and go from w towards e_t to the shortest vector on that
    line. It zigzags where the solution lies inside a face, so the result may be far from the minimum.

    Args:
        gramian: G [K, K].
        iterations: The most steps taken; 250 as in the authors' code.
        tolerance: A step that moves the weights by Σ|Δw| ≤ tolerance is the last one; 1e-5 as in the authors' code.

    Returns:
        w [K], w ≥ 0, Σw = 1. All zeros if no task is usable.

    Note:
        The paper starts from equal weights, as this does; the authors' code starts from the best pair of tasks.

    References:
        Sener and Koltun (2018), "Multi-Task Learning as Multi-Objective Optimization", Algorithm 2.
    """
    check_count("iterations", iterations)
    cosines, norms, kept = normalise(gramian)
    if not len(kept):
        return np.zeros(len(gramian))
    scaled = norms / norms.max()
    products = cosines * scaled * scaled[:, None]
    weights = np.full(len(kept), 1.0 / len(kept))
    slopes = products @ weights  # Gw, updated along
    for _ in range(iterations):
        chosen = int(slopes.argmin())
        length, cross, corner = float(weights @ slopes), float(slopes[chosen]), float(products[chosen, chosen])
        if corner <= cross:
            step = 1.0
        elif length <= cross:
            step = 0.0
        else:
            step = (length - cross) / (length - 2 * cross + corner)
        moved = 2 * step * (1 - float(weights[chosen]))  # Σ|Δw| of a step towards e_t
        weights *= 1 - step
        weights[chosen] += step
        slopes += step * (products[chosen] - slopes)
        if moved <= tolerance:
            break
    return spread(weights, kept, len(gramian))
