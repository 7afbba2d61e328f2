"""ARML: auxiliary weights whose gradients together come close to the target's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forkmerge.errors import ProblemError, check_count
from forkmerge.methods.base import LossMethod, MethodState, View, constant, pick
from forkmerge.methods.context import MethodContext, Setup
from forkmerge.methods.solvers import arml_step


@dataclass(frozen=True)
class ARML(LossMethod):
    """Auxiliary task reweighting: a descends ‖g_m − Σ_k a_k g_k‖² subject to a ≥ 0, Σa = K; the model L_m + Σ a_k L_k.

    Every 20th step a takes one step of gradient descent, is shifted to sum to the number K of auxiliaries, and clamped
    at 0. Other steps cost nothing extra.

    Args:
        lr: Learning rate of a.
        every: Steps between the steps of a.
        temperature: T of the Langevin noise √(2 T lr) ξ that the paper adds to the weights after each step, to sample
            them; 1/N samples the posterior for mean losses of N examples. 0 adds none, the default of the authors'
            scripts, too.

    State: a, one number per task.
    Passes: in every 20th step, one forward pass more and a backward pass per task.
    Memory: a copy of the branch in training; K shared gradients in every 20th step.
    Target: needed.
    Heads: weighted like the rest.

    References:
        Shi et al., Auxiliary Task Reweighting for Minimum-data Learning, NeurIPS 2020, Algorithm 1.

    Note:
        The authors' scripts skip the model's step when a moves; here the model steps, too.
    """

    needs_target = True
    lr: float = 0.05
    every: int = 20
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_count("every", self.every)
        if self.temperature < 0:
            raise ProblemError(f"temperature must not be negative, got {self.temperature!r}.")

    def start(self, setup: Setup) -> MethodState:
        """Start from weights of 1."""
        return {"weights": constant(1.0, setup)}

    def before_step(self, context: MethodContext, state: MethodState) -> None:
        """Move a, every 20th step."""
        if (context.step + 1) % self.every:
            return
        present, gramian = context.gramian()
        target = context.setup.target
        if target not in present:
            return
        weights = state["weights"].cpu().double().numpy().copy()
        weights[present] = arml_step(gramian, present.index(target), weights[present], self.lr)
        state["weights"] = torch.from_numpy(weights).to(state["weights"])

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        """Return a, and 1 for the target."""
        del losses
        return pick(state["weights"], view)

    def after_step(self, context: MethodContext, state: MethodState) -> None:
        """Add the noise, if there is any."""
        del state
        if self.temperature > 0:
            context.add_noise(math.sqrt(2 * self.temperature * context.lr))
