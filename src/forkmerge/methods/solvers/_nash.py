"""Nash-MTL and AuxiNash: the Nash bargaining solution, exactly, by damped Newton."""

from __future__ import annotations

from math import inf, sqrt
from typing import Any

import numpy as np

from forkmerge.errors import ProblemError
from forkmerge.methods.solvers._gramian import STATIONARY, Indices, Matrix, Vector, normalise, solve, spread

# Far more than the six or seven steps of ordinary Gramians: near stationarity each step only doubles the weights.
_STEPS = 100
# Newton's error squares at each step: after a step this small, the next would be below rounding.
_LAST_STEP = 1e-8
# Below this share of its power a task's b∘Cb says little about where the solution is.
_BALANCED = 0.05


def nash(gramian: Any, powers: Any = None, stationary: float = STATIONARY) -> Vector:
    """Return the Nash bargaining solution: a > 0 with G a = p/a.

    It is the minimiser of ½ aᵀGa − Σ p_i log a_i, found by damped Newton in b_i = a_i‖g_i‖ (so C b = p/b), whose
    relative steps δ solve (diag(b) C diag(b) + diag(p)) δ = p − b∘Cb: a system that is well conditioned even where C
    is singular. The direction always has ‖Σ a_i g_i‖² = Σp, however small the gradients are.

    This is the default form of Nash-MTL; `nash_truncated` is the iteration of the original.

    Args:
        gramian: G [K, K].
        powers: Bargaining powers p [K] > 0 (AuxiNash); None is p = 1 (Nash-MTL).
        stationary: The squared length below which a convex combination of unit gradients counts as zero.

    Returns:
        a [K], positive for usable tasks. At a Pareto-stationary point (a convex combination of gradients is zero)
        there is no solution: the weights that make it vanish grow without bound. Then C + εI stands for C, with ε =
        `stationary` or, if rounding made C indefinite by more, twice that: the weights stay below √(Σp/ε)/‖g_i‖, and
        what they still add to the direction goes to zero with the combination.

    Example:
        >>> nash([[4.0, 0.0], [0.0, 0.25]]).tolist()
        [0.5, 2.0]

    Note:
        The authors' code also clips the norm of the direction (to 1) and may reuse weights for several steps; both
        belong to the method, not to its solver.

    References:
        Navon et al. (2022), "Multi-Task Learning as a Bargaining Game", Claim 3.1; Shamsian et al.
        (2023), "Auxiliary Learning as an Asymmetric Bargaining Game", for the powers.
    """
    cosines, norms, kept = normalise(gramian)
    scaled, _ = bargain(cosines, check_powers(powers, kept, len(gramian)), stationary)
    return spread(scaled / norms, kept, len(gramian))


def nash_jacobian(gramian: Any, weights: Any, powers: Any = None) -> Matrix:
    """Return ∂a/∂p [K, K] at the solution a of G a = p/a: what the powers of AuxiNash are learnt with.

    Differentiating gives (G + diag(p/a²)) da = dp/a. Column j says how every a_i moves with p_j.

    Args:
        gramian: G [K, K].
        weights: a [K], the answer of `nash` for this Gramian and these powers.
        powers: p [K] > 0; None is p = 1.

    Returns:
        ∂a_i/∂p_j [K, K], zero in the rows and columns of unusable tasks.

    References:
        Shamsian et al. (2023), "Auxiliary Learning as an Asymmetric Bargaining Game", the implicit derivative of the
        bargaining solution.
    """
    cosines, norms, kept = normalise(gramian)
    shares = check_powers(powers, kept, len(gramian))
    scaled = np.asarray(weights, dtype=np.float64)[kept] * norms
    relative = np.linalg.inv(cosines * scaled * scaled[:, None] + np.diag(shares))
    jacobian = np.zeros((len(gramian), len(gramian)))
    jacobian[np.ix_(kept, kept)] = relative * (scaled / norms)[:, None]
    return jacobian


def check_powers(powers: Any, kept: Indices, tasks: int) -> Vector:
    """Return the bargaining powers of the kept tasks; None is 1 for each."""
    if powers is None:
        return np.ones(len(kept))
    values: Vector = np.asarray(powers, dtype=np.float64)
    if values.shape != (tasks,) or not (np.isfinite(values) & (values > 0)).all():
        raise ProblemError(f"powers must be {tasks} positive numbers, one per task, got {values.tolist()}.")
    return values[kept]


def bargain(cosines: Matrix, powers: Vector, stationary: float) -> tuple[Vector, bool]:
    """Return b with C b = p/b, and whether it exists; if not, b is that of C + εI."""
    if not len(powers):
        return np.zeros(0), True
    roots = np.sqrt(powers)
    sums = cosines @ roots
    length = float(roots @ sums) / float(powers.sum())
    start = roots / sqrt(max(length, stationary))  # the best multiple of √p, if it is not nearly stationary
    if length > stationary and float((balance := sums / (roots * length)).min()) > _BALANCED:
        start = start / np.sqrt(balance)  # b∘Cb = p but for what the change does to Cb: saves a Newton step
    solution, exists = _newton(cosines, powers, start, stationary)
    if not exists:
        ridge = max(stationary, -2 * float(np.linalg.eigvalsh(cosines)[0]))
        solution, _ = _newton(cosines + ridge * np.eye(len(powers)), powers, solution, 0.0)
    return solution, exists


def _newton(cosines: Matrix, powers: Vector, start: Vector, stationary: float) -> tuple[Vector, bool]:
    """Solve C b = p/b from `start`; False as soon as b shows a shorter convex combination than `stationary` allows."""
    solution = start
    total, least, before = float(powers.sum()), float(powers.min()), inf
    for _ in range(_STEPS):
        scaled = cosines * solution * solution[:, None]  # diag(b) C diag(b)
        residual = powers - solution * (cosines @ solution)
        scaled.flat[:: len(powers) + 1] += powers
        step = solve(scaled, residual)
        decrease = float(residual @ step)
        if not decrease >= 0:  # indefinite: rounding is all that is left of the combination's length
            return solution, False
        longest = sqrt(decrease / least)  # bounds every |δ_i|, because the system's matrix exceeds diag(p)
        if longest > 0.25:
            step = step * _damping(cosines, powers, solution, step, decrease)
        solution = solution * (1 + step)
        # Large weights cancel in Cb, so steps may stop shrinking at the rounding that this leaves.
        last = longest < _LAST_STEP or (longest < 0.01 and longest > 0.5 * before)
        if (last or longest > 0.25) and total < stationary * float(solution.sum()) ** 2:
            return solution, False
        if last:
            break
        before = longest
    return solution, True


def _damping(cosines: Matrix, powers: Vector, solution: Vector, step: Vector, decrease: float) -> float:
    """The first of 1, ½, ¼ … that keeps b positive and lowers ½ bᵀCb − Σ p log b as much as its slope promises."""
    lowest = float(step.min())
    scale = min(1.0, -0.95 / lowest) if lowest < 0 else 1.0
    change = solution * step
    slope, curve = float(change @ (cosines @ solution)), float(change @ cosines @ change)
    for _ in range(40):
        gain = float(powers @ np.log1p(scale * step)) - scale * slope - 0.5 * scale**2 * curve
        if gain >= 0.1 * scale * decrease:
            break
        scale *= 0.5
    return scale
