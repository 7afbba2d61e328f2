"""OL-AUX: auxiliary weights that follow the inner products of gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forkmerge.errors import check_count
from forkmerge.methods.base import GramianMethod, MethodState, View
from forkmerge.methods.context import Array, Setup


@dataclass(frozen=True)
class OL_AUX(GramianMethod):
    """Online learning for auxiliary losses: d = g_m + Σ w_k g_k, and every N steps w_k += β α Σ ⟨g_m, g_k⟩ over them.

    α is the model's learning rate: to first order, how much a step on L_k lowers L_m. w starts at 1, and a step uses
    the weights from before its own update. Weights may become negative.

    Args:
        every: N.
        beta: β.
        cosine: Sum cosines in place of inner products and leave α out: the variant of the authors' scripts.

    State: w and the running sums, one number per task each.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: needed.
    Heads: weighted like the rest.

    References:
        Lin et al., Adaptive Auxiliary Task Weighting for Reinforcement Learning, NeurIPS 2019, Algorithm 1.
    """

    needs_target = True
    weighs_heads = True
    every: int = 5
    beta: float = 1.0
    cosine: bool = False

    def __post_init__(self) -> None:
        check_count("every", self.every)

    @classmethod
    def authors_scripts(cls) -> OL_AUX:
        """The variant of the authors' scripts: cosines, β = 1e-4, N = 5."""
        return cls(every=5, beta=1e-4, cosine=True)

    def start(self, setup: Setup) -> MethodState:
        """Start from weights of 1."""
        return {"weights": [1.0] * len(setup.tasks), "sums": [0.0] * len(setup.tasks), "steps": 0}

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return w, and move it at the end of an interval."""
        weights, sums = np.array(state["weights"]), np.array(state["sums"])
        used = weights[view.indices]
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
        return used
