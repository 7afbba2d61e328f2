"""Auto-λ: task weights learnt by looking one step ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forkmerge.errors import ProblemError
from forkmerge.methods.base import LossMethod, MethodState, View, adam, constant, pick
from forkmerge.methods.context import MethodContext, Setup

LOOKS = ("second", "validation")


@dataclass(frozen=True)
class AutoLambda(LossMethod):
    """Auto-λ: task weights λ that descend the target's loss after one virtual step, by finite differences.

    θ' = θ − α(m + ∇Σ λ_i L_i + wd·θ), with the optimizer's momentum m and weight decay; d = ∇L_m(θ') on another batch;
    ε = 0.01/‖d‖; then ∂/∂λ_i = −α (L_i(θ + εd) − L_i(θ − εd))/(2ε), and an ordinary step on Σ λ_i L_i. All tasks have a
    λ, the target too.

    Args:
        lr: Learning rate of λ.
        initial: λ at the start.
        look_at: The other batch: a "second" one of the training data, or one of the target's "validation" data.

    State: λ, one number per task, and its Adam moments.
    Passes: two forward and backward passes and two forward passes more.
    Memory: a copy of the branch in training; two gradients and a copy of the weights.
    Target: needed.
    Heads: weighted like the rest.

    References:
        Liu et al., Auto-Lambda: Disentangling Dynamic Task Relationships, TMLR 2022, Section 3.

    Note:
        The paper's "validation" batch is a second training batch in the authors' code, and by default here. Where
        parameter groups have different learning rates, each takes its own in the virtual step.
    """

    needs_target = True
    lr: float = 1e-4
    initial: float = 0.1
    look_at: Literal["second", "validation"] = "second"

    def __post_init__(self) -> None:
        if self.look_at not in LOOKS:
            raise ProblemError(f"look_at must be {' or '.join(LOOKS)}, got {self.look_at!r}.")

    def start(self, setup: Setup) -> MethodState:
        """Start from equal λ."""
        return {"weights": constant(self.initial, setup)}

    def before_step(self, context: MethodContext, state: MethodState) -> None:
        """Look one step ahead, and move λ."""
        assert context.setup.target is not None
        step = context.descent(context.gradient(dict(enumerate(state["weights"].unbind()))))
        with context.moved(context.at_own_rates(step), -context.lr):
            ahead = context.gradient({context.setup.target: 1.0}, self.look_at)
        parts = [part.norm() for part in ahead if part is not None]
        if not parts:
            return
        # Where d is zero or not finite so is what follows, and λ stays.
        reach, ahead = 0.01 / torch.stack(parts).norm(), context.at_own_rates(ahead)
        with context.moved(ahead, reach):
            above = context.losses()
        with context.moved(ahead, -reach):
            below = context.losses()
        slopes = -context.lr * (above - below) / (2 * reach)
        adam(state, "weights", torch.where(slopes.isfinite(), slopes, torch.nan), self.lr)

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        """Return λ."""
        del losses
        return pick(state["weights"], view)
