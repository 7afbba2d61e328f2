"""Nash-MTL: the tasks bargain about the direction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forkmerge.errors import ProblemError, check_count
from forkmerge.methods.base import GramianMethod, MethodState, View
from forkmerge.methods.context import Array, Setup
from forkmerge.methods.solvers import nash, nash_truncated


@dataclass(frozen=True)
class NashMTL(GramianMethod):
    """Nash-MTL: d = Σ a_k g_k with G a = 1/a, the Nash bargaining solution.

    Its length is √K whatever the gradients' sizes. At a Pareto-stationary point there is no solution; see
    `forkmerge.methods.solvers.nash` for what is done there.

    Args:
        solver: "exact" (damped Newton), or the authors' "truncated" iteration, which starts from the last weights.
        iterations: The most iterations of the truncated form.
        every: Steps for which weights are used before they are computed anew.
        max_norm: The longest direction; None does not clip. The authors' code clips at 1.
        weighted_heads: Whether heads' gradients are multiplied by a, too, before any clipping.

    State: the last weights, one number per task, and how often they were used.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: not needed.
    Heads: unweighted, or by a with `weighted_heads`.

    References:
        Navon et al., Multi-Task Learning as a Bargaining Game, ICML 2022, Claim 3.1 and Algorithm 1.

    Note:
        The authors' code multiplies the heads' gradients by a (`weighted_heads`). Steps that use old weights compute
        all gradients here, too.
    """

    solver: Literal["exact", "truncated"] = "exact"
    iterations: int = 20
    every: int = 1
    max_norm: float | None = None
    weighted_heads: bool = False

    def __post_init__(self) -> None:
        if self.solver not in ("exact", "truncated"):
            raise ProblemError(f"solver must be exact or truncated, got {self.solver!r}.")
        for name in ("iterations", "every"):
            check_count(name, getattr(self, name))

    @classmethod
    def authors_scripts(cls) -> NashMTL:
        """Truncated to 20 iterations, clipped at 1, with weighted heads."""
        return cls(solver="truncated", iterations=20, every=1, max_norm=1.0, weighted_heads=True)

    def start(self, setup: Setup) -> MethodState:
        """Start from the authors' weights of 1."""
        return {"weights": [1.0] * len(setup.tasks), "age": self.every}

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return the bargaining solution, of this step or of an earlier one."""
        all_weights = np.array(state["weights"])
        last = all_weights[view.indices]
        if state["age"] >= self.every:
            state["age"] = 0
            last = nash(gramian) if self.solver == "exact" else nash_truncated(gramian, last, self.iterations)
            all_weights[view.indices] = np.where(last > 0, last, all_weights[view.indices])
            state["weights"] = all_weights.tolist()
        state["age"] += 1
        if self.weighted_heads:
            state["heads"] = last.tolist()
        return clipped(last, gramian, self.max_norm)

    def head_weights(self, weights: Array, view: View, state: MethodState) -> Array | None:
        """Return a as it was before clipping, if heads are weighted."""
        del weights, view
        return np.array(state["heads"]) if self.weighted_heads else None


def clipped(weights: Array, gramian: Array, max_norm: float | None) -> Array:
    """Scale weights down so that ‖Σ w_k g_k‖ is at most `max_norm`."""
    length = math.sqrt(max(float(weights @ gramian @ weights), 0.0))
    return weights if max_norm is None or length <= max_norm else weights * (max_norm / length)
