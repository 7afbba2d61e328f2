"""ARML: auxiliary weights whose gradients together come close to the target's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkmerge.errors import ProblemError, check_count
from forkmerge.methods.base import GramianMethod, LossMethod, Method, MethodState, View, adam, constant, pick, spread
from forkmerge.methods.context import Array, MethodContext, Setup
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
            them; 1/N samples the posterior for mean losses of N examples. 0 adds none, the default of its authors'
            code, too.

    State: a, one number per task.
    Passes: in every 20th step, one forward pass more and a backward pass per task.
    Memory: a copy of the branch in training; K shared gradients in every 20th step.
    Target: needed.
    Heads: weighted like the rest.

    References:
        Shi et al., Auxiliary Task Reweighting for Minimum-data Learning, NeurIPS 2020, Algorithm 1.

    Note:
        Its authors' code skips the model's step when a moves; here the model steps, too.
    """

    needs_target = True
    lr: float = 0.05
    every: int = 20
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_count("every", self.every)
        if self.temperature < 0:
            raise ProblemError(f"temperature must not be negative, got {self.temperature!r}.")

    @classmethod
    def authors_scripts(cls) -> Method:
        """The form of `FreeARML`: a moves in every step, anywhere."""
        return FreeARML()

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


@dataclass(frozen=True)
class FreeARML(GramianMethod):
    """ARML in the scripts of ForkMerge's authors: a descends ‖g_m − Σ_k a_k g_k‖² in every step, unconstrained.

    There is no sum to keep and no lower bound: weights may become negative. A step uses a from before its own move.

    Args:
        lr: Learning rate of a; None follows the model's.

    State: a, one number per task, and its Adam moments.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: needed.
    Heads: unweighted.

    References:
        Shi et al., Auxiliary Task Reweighting for Minimum-data Learning, NeurIPS 2020, Algorithm 1, as in the scripts
        of Jiang et al., ForkMerge, NeurIPS 2023.

    Note:
        The scripts train a with the model's optimizer; here an Adam of its own does it, without weight decay.
    """

    needs_target = True
    lr: float | None = None

    def start(self, setup: Setup) -> MethodState:
        """Start from weights of 1."""
        return {"weights": torch.ones(len(setup.tasks), dtype=torch.float64)}

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return a, and 1 for the target, and move a."""
        weights: Array = state["weights"].numpy()[view.indices]
        if view.target is None:
            return weights
        auxiliary = np.where(np.arange(len(weights)) == view.target, 0.0, weights)
        slopes = -2 * (gramian[view.target] - gramian @ auxiliary)
        slopes[view.target] = np.nan  # its own weight stays 1
        adam(state, "weights", spread(torch.from_numpy(slopes), view), float(view.lr if self.lr is None else self.lr))
        return weights
