"""FAMO: all losses fall at about the same rate, seen from the losses alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forkmerge.methods.base import LossMethod, MethodState, View, adam, constant, pick, spread
from forkmerge.methods.context import MethodContext, Setup

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
    Memory: a copy of the branch in training.
    Target: not needed.
    Heads: weighted like the rest.

    References:
        Liu et al., FAMO: Fast Adaptive Multitask Optimization, NeurIPS 2023, Algorithm 1.

    Note:
        γ is chosen by problem: the authors' code has 0.01 by default and for CelebA, and 0.001 for QM9, which is the
        default here. Like in that code, ξ moves by Adam; that code also clips the shared gradient at 1.
    """

    lr: float = 0.025
    decay: float = 1e-3
    lower_bound: float = 0.0

    def start(self, setup: Setup) -> MethodState:
        """Start from equal z."""
        return {"logits": constant(0.0, setup), "before": None}

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        """Return c z/L, and remember L."""
        state["before"] = spread(losses, view)
        shares = torch.softmax(pick(state["logits"], view), 0) / self._shifted(losses)
        return shares / shares.sum()

    def after_step(self, context: MethodContext, state: MethodState) -> None:
        """Compare the losses on the same batch, and move ξ."""
        before: Tensor | None = state["before"]
        if before is None:
            return
        state["before"] = None
        gains = self._shifted(before).log_() - self._shifted(context.losses()).log_()
        is_finite = gains.isfinite()  # without a label, or a finite loss, before and after, ξ of a task stays
        shares = torch.softmax(torch.where(is_finite, state["logits"], -torch.inf), 0)
        mean = shares @ torch.where(is_finite, gains, 0.0)
        adam(state, "logits", shares * (gains - mean), self.lr, weight_decay=self.decay)

    def _shifted(self, losses: Tensor) -> Tensor:
        return (losses - self.lower_bound).clamp_min_(_SMALLEST)
