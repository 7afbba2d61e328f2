"""UW: losses weighted by learnt uncertainties."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forkmerge.methods.base import LossMethod, MethodState, View, adam, constant, pick, spread
from forkmerge.methods.context import Setup


@dataclass(frozen=True)
class UW(LossMethod):
    """Uncertainty weighting: minimise Σ_k ½ e^(−s_k) L_k + ½ s_k over the model and the log-variances s.

    The weights are ½ e^(−s_k), ½ at the start, where s is 0; s moves along its own gradient ½ (1 − e^(−s_k) L_k).

    Args:
        lr: Learning rate of s; None follows the model's: that of its first parameter group, or of `fit(lr_of=…)`.
        initial: s at the start. The paper does not say; LibMTL and the authors' scripts of ForkMerge start from −0.5,
            weights of 0.82.

    State: s, one number per task, and its Adam moments.
    Passes: none beyond the step's own.
    Memory: a copy of the branch in training.
    Target: not needed.
    Heads: weighted like the rest.

    References:
        Kendall et al., Multi-Task Learning Using Uncertainty to Weigh Losses, CVPR 2018, Eq. 7 and 10.

    Note:
        The paper trains s with the model's optimizer; here an Adam of its own does it, without weight decay or
        clipping. Every loss has the factor ½ that the paper gives to regression.
    """

    lr: float | None = None
    initial: float = 0.0

    @classmethod
    def authors_scripts(cls) -> UW:
        """From s = −0.5."""
        return cls(initial=-0.5)

    def start(self, setup: Setup) -> MethodState:
        """Start from equal variances."""
        return {"logs": constant(self.initial, setup)}

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        """Return ½ e^(−s), and move s."""
        weights = 0.5 * torch.exp(-pick(state["logs"], view))
        adam(state, "logs", spread(0.5 - weights * losses, view), view.lr if self.lr is None else self.lr)
        return weights
