"""GradNorm: loss weights that bring the gradients of all tasks to a common size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from forkmerge.methods.base import GramianMethod, MethodState, View, Where, adam, check_where, spread
from forkmerge.methods.context import Array, Setup


@dataclass(frozen=True)
class GradNorm(GramianMethod):
    """Gradient normalisation: weights w descend Σ_k |w_k‖g_k‖ − ḡ r_k^α|, and are scaled to sum to K.

    ḡ is the mean of w_k‖g_k‖ and r_k = (L_k/L_k(0)) over its mean, the inverse training rate; both count as constants.
    The step itself uses the weights from before their move.

    Args:
        alpha: α, how strongly slow tasks are favoured.
        lr: Learning rate of w; None follows the model's.
        softmax: Learn s with w = K · softmax(s), and L_k(0) is the mean over the first epoch, in which w stays 1.
        weighted_heads: Whether heads' gradients are multiplied by w, too.
        gradients: Where gradients are compared: at the "parameters", at the "representation", or there summed over the
            batch, "summed_representation"; None follows `fit(gradients=…)`.

    State: w, or s, and the first losses, one number per task each, and Adam moments.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: not needed.
    Heads: weighted like the rest, unless `weighted_heads` is False.

    References:
        Chen et al., GradNorm: Gradient Normalization for Adaptive Loss Balancing, ICML 2018, Eq. 2 and Algorithm 1.

    Note:
        The paper takes the gradients of the last shared layer; here they are those of all shared parameters, or at
        the representation with `fit(gradients="representation")`. A weight that would become negative becomes 0.
        In steps without a label of some task the present ones keep their share of the sum.
    """

    weighs_heads = True
    alpha: float = 1.5
    lr: float | None = 0.025
    softmax: bool = False
    weighted_heads: bool = True
    gradients: Where | None = None

    def __post_init__(self) -> None:
        check_where(self.gradients)

    @classmethod
    def authors_scripts(cls) -> GradNorm:
        """LibMTL's: a softmax at the model's learning rate, at the summed representation, heads unweighted."""
        return cls(alpha=1.5, lr=None, softmax=True, weighted_heads=False, gradients="summed_representation")

    def start(self, setup: Setup) -> MethodState:
        """Start from weights of 1."""
        size = len(setup.tasks)
        state = {"weights": torch.ones(size, dtype=torch.float64), "first": [None] * size}
        return {**state, "counts": [0] * size} if self.softmax else state

    def head_weights(self, weights: Array, view: View, state: MethodState) -> Array | None:
        """Return w, if heads are weighted."""
        del view, state
        return weights if self.weighted_heads else None

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return w, and move it."""
        if self.softmax:
            return self._by_softmax(gramian, view, state)
        weights: Array = state["weights"].numpy()[view.indices]
        for i, loss in zip(view.indices, view.losses.tolist(), strict=True):
            if state["first"][i] is None:
                state["first"][i] = loss
        norms = np.sqrt(np.diagonal(gramian))
        sizes = weights * norms
        goals = sizes.mean() * self._rates(view, state) ** self.alpha
        adam(state, "weights", spread(torch.from_numpy(np.sign(sizes - goals) * norms), view), self._lr(view))
        moved = np.maximum(state["weights"].numpy(), 0.0)
        state["weights"] = torch.from_numpy(moved * len(moved) / moved.sum() if moved.any() else np.ones_like(moved))
        return weights

    def _by_softmax(self, gramian: Array, view: View, state: MethodState) -> Array:
        if view.step < view.setup.epoch:
            for i, loss in zip(view.indices, view.losses.tolist(), strict=True):
                state["counts"][i] += 1
                mean = state["first"][i] or 0.0
                state["first"][i] = mean + (loss - mean) / state["counts"][i]
            return np.ones(len(gramian))
        for i, loss in zip(view.indices, view.losses.tolist(), strict=True):  # without a label in the first epoch
            state["first"][i] = loss if state["first"][i] is None else state["first"][i]
        shares: Array = torch.softmax(state["weights"], 0).numpy()[view.indices]
        weights, norms = len(state["weights"]) * shares, np.sqrt(np.diagonal(gramian))
        sizes = weights * norms
        goals = sizes.mean() * self._rates(view, state) ** self.alpha
        slopes = np.sign(sizes - goals) * norms  # of the sum of distances, in w
        slopes = weights * (slopes - shares @ slopes)  # and in s
        adam(state, "weights", spread(torch.from_numpy(slopes), view), self._lr(view))
        return weights

    def _lr(self, view: View) -> float:
        return float(view.lr if self.lr is None else self.lr)

    def _rates(self, view: View, state: MethodState) -> Array:
        first = np.array([state["first"][i] for i in view.indices])
        rates = np.divide(view.losses, first, out=np.ones_like(first), where=first != 0)
        mean = rates.mean()
        result: Array = np.maximum(rates / mean, 0.0) if mean > 0 else np.ones_like(rates)
        return result
