"""DWA: tasks that fall slowly count more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forkmerge.methods._base import Array, LossMethod, MethodState, Setup, View


@dataclass(frozen=True)
class DWA(LossMethod):
    """Dynamic weight average: weights K · softmax(r/T), with r_k = L_k(t−1)/L_k(t−2) over the last two epochs.

    An epoch is one pass over the target's training data; L_k its mean loss. The weights sum to K, and are 1 in the
    first two epochs.

    Args:
        temperature: T; larger is more equal.

    State: mean losses of the last two epochs and the sums of this one.
    Passes: none beyond the step's own.
    Memory: none.
    Target: not needed; its data set says how long an epoch is.
    Heads: weighted like the rest.

    References:
        Liu et al., End-to-End Multi-Task Learning with Attention, CVPR 2019, Eq. 7.
    """

    temperature: float = 2.0

    def start(self, setup: Setup) -> MethodState:
        """Start with no epoch behind."""
        zeros = [0.0] * len(setup.tasks)
        return {"epoch": -1, "sums": zeros, "counts": list(zeros), "means": []}

    def weights(self, view: View, state: MethodState) -> Array:
        """Return the epoch's weights, and add the step's losses to its sums."""
        self._turn(view, state)
        sums, counts = np.array(state["sums"]), np.array(state["counts"])
        sums[view.indices] += view.losses
        counts[view.indices] += 1
        state.update(sums=sums.tolist(), counts=counts.tolist())
        if len(state["means"]) < 2:
            return np.ones(len(view.present))
        older, newer = (np.array(means)[view.indices] for means in state["means"])
        with np.errstate(all="ignore"):
            rates = newer / older
        rates = np.where(np.isfinite(rates), rates, 1.0)  # a task that an epoch did not show, or whose loss was 0
        powers = np.exp((rates - rates.max()) / self.temperature)
        weights: Array = len(rates) * powers / powers.sum()
        return weights

    def _turn(self, view: View, state: MethodState) -> None:
        """Close the epoch if this step begins another."""
        epoch = view.step // view.setup.epoch
        if epoch == state["epoch"]:
            return
        if state["epoch"] >= 0:
            with np.errstate(all="ignore"):
                means = (np.array(state["sums"]) / np.array(state["counts"])).tolist()
            state["means"] = [*state["means"], means][-2:]
        zeros = [0.0] * len(view.setup.tasks)
        state.update(epoch=epoch, sums=zeros, counts=list(zeros))
