"""AuxiNash: a bargain in which the tasks' powers are learnt for the target's sake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from forkmerge.errors import ProblemError, check_count
from forkmerge.methods._autolambda import LOOKS
from forkmerge.methods._nash import clipped
from forkmerge.methods.base import GramianMethod, MethodState, View
from forkmerge.methods.context import Array, Setup
from forkmerge.methods.solvers import nash, nash_jacobian


@dataclass(frozen=True)
class AuxiNash(GramianMethod):
    """AuxiNash: d = Σ a_k g_k with G a = p/a, the bargaining powers p learnt through a(p) to lower the target's loss.

    Every 25th step: with v the target's gradient on another batch and s_k = ⟨g_k, v⟩, a step along d lowers that
    loss by α Σ a_k s_k, so p descends −(∂a/∂p)ᵀ s, where ∂a/∂p = (G + diag(p/a²))⁻¹ diag(1/a). The gradient is
    clipped to length 1; p moves by gradient descent with momentum, is held above 0.0001 and scaled to sum to the
    number of tasks, and takes effect in the next step.

    Args:
        lr: Learning rate of p.
        momentum: Momentum of p.
        every: Steps between the steps of p.
        look_at: The other batch: a "second" one of the training data, or one of the target's "validation" data.
        max_norm: The longest direction; None does not clip. The authors' code clips at 1.

    State: p and its momentum, one number per task each.
    Passes: one backward pass per task; every 25th step, one forward and backward pass more.
    Memory: K shared gradients, and one more in every 25th step.
    Target: needed.
    Heads: unweighted.

    References:
        Shamsian et al., Auxiliary Learning as an Asymmetric Bargaining Game, ICML 2023, Section 4.

    Note:
        The paper's hypergradient has the inverse Hessian of the training loss, truncated to a few terms of a
        Neumann series; here it is the identity, the one-step look-ahead, whose direction those terms hardly
        change. The authors compute g_k anew for the update; here they are those of the step. With
        `fit(gradients="representation")` s is taken on the step's own batch.
    """

    needs_target = True
    lr: float = 5e-3
    momentum: float = 0.9
    every: int = 25
    look_at: Literal["second", "validation"] = "second"
    max_norm: float | None = None

    def __post_init__(self) -> None:
        check_count("every", self.every)
        if self.look_at not in LOOKS:
            raise ProblemError(f"look_at must be {' or '.join(LOOKS)}, got {self.look_at!r}.")

    def start(self, setup: Setup) -> MethodState:
        """Start from equal powers: Nash-MTL."""
        return {"powers": [1.0] * len(setup.tasks), "velocity": [0.0] * len(setup.tasks)}

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return the bargaining solution for the present powers, and move them every 25th step."""
        powers = np.array(state["powers"])[view.indices]
        weights = nash(gramian, powers)
        if (view.step + 1) % self.every == 0 and view.target is not None:
            self._learn(gramian, weights, powers, view, state)
        return clipped(weights, gramian, self.max_norm)

    def _learn(self, gramian: Array, weights: Array, powers: Array, view: View, state: MethodState) -> None:
        assert view.setup.target is not None
        assert view.target is not None
        ahead = view.context.gradient({view.setup.target: 1.0}, self.look_at)
        products = view.context.products(ahead)
        if products is None:
            products = gramian[:, view.target]
        slope = -nash_jacobian(gramian, weights, powers).T @ products
        if not np.isfinite(slope).all():
            return
        slope /= max(1.0, float(np.linalg.norm(slope)))
        velocity, every_power = np.array(state["velocity"]), np.array(state["powers"])
        velocity[view.indices] = self.momentum * velocity[view.indices] + slope
        every_power[view.indices] -= self.lr * velocity[view.indices]
        every_power = np.maximum(every_power, 1e-4)
        state.update(velocity=velocity.tolist(), powers=(every_power * len(every_power) / every_power.sum()).tolist())
