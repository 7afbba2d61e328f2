"""FAMO: all losses fall at about the same rate, seen from the losses alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forkmerge.methods._base import Array, LossMethod, MethodState, Setup, View, adam, spread

if TYPE_CHECKING:
    from forkmerge.probe import Probe

_SMALLEST = 1e-8  # what a loss that reached its lower bound counts as


@dataclass(frozen=True)
class FAMO(LossMethod):
    """Fast adaptive multitask optimization: descend Σ_k c z_k log(L_k − b), with z = softmax(ξ) and c = 1/Σ (z_k/L_k).

    After the step the losses of the same batch are computed again, and ξ follows (∂z/∂ξ)ᵀ (log L − log L') + γξ, so
    that tasks which improved least count more. The weights c z_k/L_k sum to 1. Losses must be positive.

    Args:
        lr: Learning rate of ξ.
        decay: γ.
        lower_bound: b, the least a loss can be.

    State: ξ, one number per task, its Adam moments, and the losses before the step.
    Passes: one more forward pass.
    Memory: none.
    Target: not needed.
    Heads: weighted like the rest.

    References:
        Liu et al., FAMO: Fast Adaptive Multitask Optimization, NeurIPS 2023, Algorithm 1.

    Note:
        γ = 0.001 is the paper's; the authors' code has 0.00001. Like that code, ξ moves by Adam.
    """

    lr: float = 0.025
    decay: float = 1e-3
    lower_bound: float = 0.0

    def start(self, setup: Setup) -> MethodState:
        """Start from equal z."""
        return {"logits": [0.0] * len(setup.tasks), "before": []}

    def weights(self, view: View, state: MethodState) -> Array:
        """Return c z/L, and remember L."""
        state["before"] = spread(view.losses, view).tolist()
        shares = _softmax(np.array(state["logits"])[view.indices]) / self._shifted(view.losses)
        weights: Array = shares / shares.sum()
        return weights

    def after_step(self, probe: Probe, state: MethodState) -> None:
        """Compare the losses on the same batch, and move ξ."""
        if not state["before"]:
            return
        before, after = np.array(state["before"]), np.full(len(state["before"]), np.nan)
        state["before"] = []
        present, losses = probe.losses()
        after[present] = losses
        known = np.isfinite(before) & np.isfinite(after)
        if not known.any():
            return
        gains = np.log(self._shifted(before[known])) - np.log(self._shifted(after[known]))
        shares = _softmax(np.array(state["logits"])[known])
        gradient = np.full(len(before), np.nan)
        gradient[known] = shares * (gains - shares @ gains)
        adam(state, "logits", gradient, self.lr, weight_decay=self.decay)

    def _shifted(self, losses: Array) -> Array:
        return np.maximum(losses - self.lower_bound, _SMALLEST)


def _softmax(values: Array) -> Array:
    powers = np.exp(values - values.max())
    result: Array = powers / powers.sum()
    return result
