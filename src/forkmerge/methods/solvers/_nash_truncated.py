"""Nash-MTL as the original computes it: a truncated convex-concave iteration."""

from __future__ import annotations

from typing import Any

import numpy as np

from forkmerge.errors import ProblemError, check_count
from forkmerge.methods.solvers._gramian import STATIONARY, Matrix, Vector, normalise, solve, spread
from forkmerge.methods.solvers._nash import bargain, check_powers

_INNER_STEPS = 200  # some fifty are usual
_INNER_GAP = 1e-10  # the distance from the minimum, relative to it, at which an inner problem counts as solved
_SHARPEN = 20.0  # the factor between two barriers: each then costs some five steps
_CENTRED = 1e-2  # the decrease still promised at which the next barrier may begin
_CHANGE = 1e-6  # the authors' threshold for the change of the weights between two iterations, here relative


def nash_truncated(gramian: Any, previous: Any = None, iterations: int = 20, powers: Any = None) -> Vector:
    """Return Nash-MTL's weights as the original finds them: some iterations from the weights of the step before.

    Each iteration linearises φ(a) = Σ_i log a_i + log (Ga)_i at the current a^t and takes for a^(t+1) the minimiser of
    Σ_i (Ga)_i + ∇φ(a^t)·a subject to log a_i + log (Ga)_i ≥ log p_i, a convex problem. Where all constraints are tight,
    a is the answer of `nash`.

    How the inner problem is solved without a modelling library: where multipliers exist that are non-negative at the
    point with all constraints tight, one K×K system shows it and that point is the minimiser (the constraints are
    convex, so this is sufficient). Otherwise a barrier method starts from that point moved outwards, which
    is strictly feasible.

    Args:
        gramian: G [K, K].
        previous: a [K] of the step before, positive; None is a = 1, the authors' start. Zeros, which an earlier
            answer holds for tasks that were unusable then, are read as 1.
        iterations: The most iterations; 20 as in the authors' code.
        powers: Bargaining powers p [K] > 0 (AuxiNash); None is p = 1.

    Returns:
        a [K]. Where an inner problem has no solution (Pareto-stationary point: no feasible a; or a^t with some
        (Ga^t)_i ≤ 0, where the linearisation may be unbounded) the a reached before it is kept, as in the authors'
        code.

    Note:
        The authors stop when ‖Ga − 1/a‖ < 1e-3 with G divided by its norm but a not, so that weights freeze when
        gradients are small. This stops only when a no longer changes (relatively, by 1e-6).

    References:
        Navon et al. (2022), "Multi-Task Learning as a Bargaining Game", section 3.2 and Algorithm 1.
    """
    check_count("iterations", iterations)
    cosines, norms, kept = normalise(gramian)
    if not len(kept):
        return np.zeros(len(gramian))
    shares = check_powers(powers, kept, len(gramian))
    current = _start(previous, len(gramian))[kept] * norms  # b = a‖g‖, as in `nash`
    tight, feasible = bargain(cosines, shares, STATIONARY)
    for _ in range(iterations if feasible else 0):
        sums = cosines @ current
        if not sums.all():
            break
        costs = cosines @ (norms + 1 / sums) + 1 / current
        following = _minimise(cosines, shares, costs, tight)
        if following is None:
            break
        change = float(np.abs(following / current - 1).max())
        current = following
        if change < _CHANGE:
            break
    return spread(current / norms, kept, len(gramian))


def _start(previous: Any, tasks: int) -> Vector:
    if previous is None:
        return np.ones(tasks)
    values: Vector = np.array(previous, dtype=np.float64)
    if values.shape != (tasks,) or not (np.isfinite(values) & (values >= 0)).all():
        raise ProblemError(f"previous must hold {tasks} weights that are not negative, got {values.tolist()}.")
    values[values == 0] = 1.0
    return values


def _minimise(cosines: Matrix, powers: Vector, costs: Vector, tight: Vector) -> Vector | None:
    """Minimise costs·b subject to log b_i + log (Cb)_i ≥ log p_i, given the point where all are equal."""
    gradients = np.diag(1 / tight) + cosines * (tight / powers)  # column i: ∇(log b_i + log (Cb)_i)
    if float(solve(gradients, costs).min()) >= 0:
        return tight
    return _follow_path(cosines, powers, costs, 1.1 * tight)


def _follow_path(cosines: Matrix, powers: Vector, costs: Vector, point: Vector) -> Vector | None:
    """The same in general, from a strictly feasible point; None if there is no minimum.

    Newton on τ·costs·b − Σ log slack_i for growing τ, whose minimiser is within K/τ of the problem's. Multiples s ≥ 1
    of a feasible point are feasible, so a point of negative cost shows that the problem is unbounded.
    """
    tasks = len(powers)
    sharpness = tasks / float(np.abs(costs * point).sum())
    slack, sums = _slack(cosines, powers, point)
    for _ in range(_INNER_STEPS):
        cost = float(costs @ point)
        if cost <= 0:
            break
        gradients = np.diag(1 / point) + cosines / sums  # column i: ∇slack_i
        slope = sharpness * costs - gradients @ (1 / slack)
        curvature = (gradients / slack**2) @ gradients.T + (cosines / (slack * sums**2)) @ cosines
        curvature.flat[:: tasks + 1] += 1 / (slack * point**2)
        step = solve(curvature, -slope)
        decrease = -float(slope @ step)
        if decrease < _CENTRED:
            if tasks <= _INNER_GAP * sharpness * cost:
                return point
            sharpness *= _SHARPEN
            continue
        moved = _descend(cosines, powers, sharpness * costs, point, slack, step, decrease)
        if moved is None:
            break
        point, slack, sums = moved
    return None


def _descend(
    cosines: Matrix, powers: Vector, costs: Vector, point: Vector, slack: Vector, step: Vector, decrease: float
) -> tuple[Vector, Vector, Vector] | None:
    """Go along `step` as far as costs·b − Σ log slack_i falls as promised: the point, its slack and its sums C·b."""
    length = 1.0
    for _ in range(60):
        moved = point + length * step
        if moved.min() > 0 and (cosines @ moved).min() > 0:
            left, sums = _slack(cosines, powers, moved)
            if left.min() > 0:
                change = length * float(costs @ step) - float(np.log(left / slack).sum())
                if change <= -0.1 * length * decrease:
                    return moved, left, sums
        length *= 0.5
    return None


def _slack(cosines: Matrix, powers: Vector, point: Vector) -> tuple[Vector, Vector]:
    sums = cosines @ point
    return np.log(point * sums / powers), sums
