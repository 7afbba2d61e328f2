"""EW: every task counts the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forkmerge.methods.base import LossMethod, MethodState, View


@dataclass(frozen=True)
class EW(LossMethod):
    """Equal weights: d = Σ_k g_k, with the branch's task weights in the losses.

    The same as no method at all, up to rounding; it is here so that tables can name it.

    State: none.
    Passes: none beyond the step's own.
    Memory: a copy of the branch in training.
    Target: not needed.
    Heads: weighted like the rest, by 1.

    References:
        Caruana, Multitask Learning, Machine Learning 28, 1997.
    """

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        """Return ones."""
        del view, state
        return torch.ones_like(losses)
