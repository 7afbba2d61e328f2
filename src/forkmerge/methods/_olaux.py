"""OL-AUX: auxiliary weights that follow the inner products of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from forkmerge.errors import ProblemError, check_count
from forkmerge.methods.base import GramianMethod, MethodState, View
from forkmerge.methods.context import Array, Setup


@dataclass(frozen=True)
class OL_AUX(GramianMethod):
    """Online learning for auxiliary losses: d = g_m + Σ w_k g_k, and every N steps w_k += β α Σ ⟨g_m, g_k⟩ over them.

    α is the model's learning rate: to first order, how much a step on L_k lowers L_m. w starts at 1, and a step uses
    the weights from before its own update, unless they are `applied` after. Weights may become negative.

    Args:
        every: N.
        beta: β.
        cosine: Sum cosines in place of inner products and leave α out.
        applied: Whether a step that moves the weights uses those from "before" or "after".
        weighted_heads: Whether heads' gradients are multiplied by w, too.

    State: w and the running sums, one number per task each.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: needed.
    Heads: weighted like the rest, unless `weighted_heads` is False.

    References:
        Lin et al., Adaptive Auxiliary Task Weighting for Reinforcement Learning, NeurIPS 2019, Algorithm 1.
    """

    needs_target = True
    weighs_heads = True
    every: int = 5
    beta: float = 1.0
    cosine: bool = False
    applied: Literal["before", "after"] = "before"
    weighted_heads: bool = True

    def __post_init__(self) -> None:
        check_count("every", self.every)
        if self.applied not in ("before", "after"):
            raise ProblemError(f"applied must be before or after, got {self.applied!r}.")

    @classmethod
    def authors_scripts(cls) -> OL_AUX:
        """Cosines without α, β = 1e-4, N = 5; every fifth step uses the weights it has moved; heads are unweighted."""
        return cls(every=5, beta=1e-4, cosine=True, applied="after", weighted_heads=False)

    def start(self, setup: Setup) -> MethodState:
        """Start from weights of 1."""
        return {"weights": [1.0] * len(setup.tasks), "sums": [0.0] * len(setup.tasks), "steps": 0}

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return w, and move it at the end of an interval."""
        weights, sums = np.array(state["weights"]), np.array(state["sums"])
        before = weights[view.indices]
        if view.target is not None:
            products = gramian[view.target].copy()
            if self.cosine:
                norms = np.sqrt(np.diagonal(gramian))
                products /= np.where(norms > 0, norms, 1.0) * (norms[view.target] or 1.0)
            products[view.target] = 0.0  # the target's own weight stays 1
            sums[view.indices] += products
        state["steps"] += 1
        if state["steps"] == self.every:
            weights += self.beta * (1.0 if self.cosine else float(view.lr)) * sums
            sums, state["steps"] = np.zeros_like(sums), 0
        state.update(weights=weights.tolist(), sums=sums.tolist())
        return before if self.applied == "before" else weights[view.indices]

    def head_weights(self, weights: Array, view: View, state: MethodState) -> Array | None:
        """Return w, if heads are weighted."""
        del view, state
        return weights if self.weighted_heads else None
