"""GradNorm: loss weights that bring the gradients of all tasks to a common size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from forkmerge.methods.base import GramianMethod, MethodState, View, adam, spread
from forkmerge.methods.context import Array, Setup


@dataclass(frozen=True)
class GradNorm(GramianMethod):
    """Gradient normalisation: weights w descend Σ_k |w_k‖g_k‖ − ḡ r_k^α|, and are scaled to sum to K.

    ḡ is the mean of w_k‖g_k‖ and r_k = (L_k/L_k(0)) over its mean, the inverse training rate; both count as constants.
    The step itself uses the weights from before their move.

    Args:
        alpha: α, how strongly slow tasks are favoured.
        lr: Learning rate of w.

    State: w and the first losses, one number per task each, and Adam moments.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: not needed.
    Heads: weighted like the rest.

    References:
        Chen et al., GradNorm: Gradient Normalization for Adaptive Loss Balancing, ICML 2018, Eq. 2 and Algorithm 1.

    Note:
        The paper takes the gradients of the last shared layer; here they are those of all shared parameters, or at
        the representation with `fit(gradients="representation")`. A weight that would become negative becomes 0.
        In steps without a label of some task the present ones keep their share of the sum.
    """

    weighs_heads = True
    alpha: float = 1.5
    lr: float = 0.025

    def start(self, setup: Setup) -> MethodState:
        """Start from weights of 1."""
        return {"weights": torch.ones(len(setup.tasks), dtype=torch.float64), "first": [None] * len(setup.tasks)}

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return w, and move it."""
        weights: Array = state["weights"].numpy()[view.indices]
        for i, loss in zip(view.indices, view.losses.tolist(), strict=True):
            if state["first"][i] is None:
                state["first"][i] = loss
        norms = np.sqrt(np.diagonal(gramian))
        sizes = weights * norms
        goals = sizes.mean() * self._rates(view, state) ** self.alpha
        adam(state, "weights", spread(torch.from_numpy(np.sign(sizes - goals) * norms), view), self.lr)
        moved = np.maximum(state["weights"].numpy(), 0.0)
        state["weights"] = torch.from_numpy(moved * len(moved) / moved.sum() if moved.any() else np.ones_like(moved))
        return weights

    def _rates(self, view: View, state: MethodState) -> Array:
        first = np.array([state["first"][i] for i in view.indices])
        rates = np.divide(view.losses, first, out=np.ones_like(first), where=first != 0)
        mean = rates.mean()
        result: Array = np.maximum(rates / mean, 0.0) if mean > 0 else np.ones_like(rates)
        return result
