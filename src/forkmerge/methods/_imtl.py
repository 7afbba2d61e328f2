"""IMTL: impartial in losses (L), in gradients (G), or in both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkmerge.methods.base import GramianMethod, LossMethod, MethodState, View, adam, constant, pick, spread
from forkmerge.methods.context import Array, Setup
from forkmerge.methods.solvers import imtl_g


@dataclass(frozen=True)
class IMTL_L(LossMethod):
    """Loss balance of IMTL: minimise Σ_k e^(s_k) L_k − s_k over the model and the scales s.

    The weights e^(s_k) bring all scaled losses to 1; s moves along its own gradient e^(s_k) L_k − 1. Losses must be
    positive.

    Args:
        lr: Learning rate of s; None follows the model's: that of its first parameter group, or of `fit(lr_of=…)`.

    State: s, one number per task, and its Adam moments.
    Passes: none beyond the step's own.
    Memory: a copy of the branch in training.
    Target: not needed.
    Heads: weighted like the rest.

    References:
        Liu et al., Towards Impartial Multi-task Learning, ICLR 2021, Section 3.2.

    Note:
        The paper trains s with the model's optimizer; here an Adam of its own does it.
    """

    lr: float | None = None

    def start(self, setup: Setup) -> MethodState:
        """Start from scales of 1."""
        return {"logs": constant(0.0, setup)}

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        """Return e^s, and move s."""
        return _scale_losses(losses, view, state, self.lr)


@dataclass(frozen=True)
class IMTL_G(GramianMethod):
    """Gradient balance of IMTL: d = Σ w_k g_k with Σw = 1 and equal projections on all unit gradients.

    State: none.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: not needed.
    Heads: unweighted.

    References:
        Liu et al., Towards Impartial Multi-task Learning, ICLR 2021, Section 3.1.
    """

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return the closed form."""
        del view, state
        return imtl_g(gramian)


@dataclass(frozen=True)
class IMTL(GramianMethod):
    """IMTL, both balances: IMTL-G on the gradients of the losses that IMTL-L has scaled.

    With h_k = e^(s_k): d = Σ w_k h_k g_k, where w makes the projections on all h_k g_k equal; heads descend h_k L_k.

    Args:
        lr: Learning rate of s; None follows the model's: that of its first parameter group, or of `fit(lr_of=…)`.

    State: s, one number per task, and its Adam moments.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: not needed.
    Heads: weighted, by their loss scale h_k alone.

    References:
        Liu et al., Towards Impartial Multi-task Learning, ICLR 2021, Algorithm 1.

    Note:
        The paper trains s with the model's optimizer; here an Adam of its own does it.
    """

    weighs_heads = True
    lr: float | None = None

    def start(self, setup: Setup) -> MethodState:
        """Start from scales of 1."""
        return {"logs": torch.zeros(len(setup.tasks), dtype=torch.float64), "scales": []}

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return w h, and move s."""
        scales: Array = _scale_losses(torch.from_numpy(view.losses), view, state, self.lr).numpy()
        state["scales"] = scales.tolist()
        return imtl_g(gramian * scales * scales[:, None]) * scales

    def head_weights(self, weights: Array, view: View, state: MethodState) -> Array:
        """Return h."""
        del weights, view
        return np.array(state["scales"])


def _scale_losses(losses: Tensor, view: View, state: MethodState, lr: float | None) -> Tensor:
    scales = torch.exp(pick(state["logs"], view))
    adam(state, "logs", spread(scales * losses - 1, view), view.lr if lr is None else lr)
    return scales
