"""DWA: tasks that fall slowly count more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forkmerge.methods.base import LossMethod, MethodState, View, constant, pick, spread
from forkmerge.methods.context import Setup


@dataclass(frozen=True)
class DWA(LossMethod):
    """Dynamic weight average: weights K · softmax(r/T), with r_k = L_k(t−1)/L_k(t−2) over the last two epochs.

    An epoch is one pass over the target's training data; L_k its mean loss. The weights sum to K, and are 1 in the
    first two epochs.

    Args:
        temperature: T; larger is more equal.

    State: mean losses of the last two epochs and the sums of this one.
    Passes: none beyond the step's own.
    Memory: a copy of the branch in training.
    Target: not needed; its data set says how long an epoch is.
    Heads: weighted like the rest.

    References:
        Liu et al., End-to-End Multi-Task Learning with Attention, CVPR 2019, Eq. 7.
    """

    temperature: float = 2.0

    def start(self, setup: Setup) -> MethodState:
        """Start with no epoch behind."""
        return {"epoch": -1, "sums": constant(0.0, setup), "counts": constant(0.0, setup), "means": []}

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        """Return the epoch's weights, and add the step's losses to its sums."""
        self._turn(view, state)
        shown = spread(losses, view)
        has_loss = shown == shown
        state.update(sums=state["sums"] + torch.where(has_loss, shown, 0.0), counts=state["counts"] + has_loss)
        if len(state["means"]) < 2:
            return torch.ones_like(losses)
        older, newer = (pick(means, view) for means in state["means"])
        rates = newer / older
        rates = torch.where(rates.isfinite(), rates, 1.0)  # a task that an epoch did not show, or whose loss was 0
        return len(losses) * torch.softmax(rates / self.temperature, 0)

    def _turn(self, view: View, state: MethodState) -> None:
        """Close the epoch if this step begins another."""
        epoch = view.step // view.setup.epoch
        if epoch == state["epoch"]:
            return
        if state["epoch"] >= 0:
            state["means"] = [*state["means"], state["sums"] / state["counts"]][-2:]
        zeros = constant(0.0, view.setup)
        state.update(epoch=epoch, sums=zeros, counts=zeros)
