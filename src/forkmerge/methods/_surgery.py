"""PCGrad and GradVac: gradients corrected against one another, among all tasks or towards the target only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from forkmerge.methods.base import GramianMethod, MethodState, View
from forkmerge.methods.context import Array, Setup
from forkmerge.methods.solvers import gradvac, pcgrad


@dataclass(frozen=True)
class PCGrad(GramianMethod):
    """Projecting conflicting gradients: from each g_i its part against every g_j with ⟨g_i, g_j⟩ < 0 is taken away.

    The others are visited in an order drawn anew for every task and step. The direction is the sum of the results.

    State: none.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: not needed.
    Heads: unweighted.

    References:
        Yu et al., Gradient Surgery for Multi-Task Learning, NeurIPS 2020, Algorithm 1.
    """

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return the weights of the projected gradients' sum."""
        del state
        return pcgrad(gramian, _order(view))


@dataclass(frozen=True)
class TargetAwarePCGrad(GramianMethod):
    """PCGrad for auxiliary learning: only auxiliaries are projected, and only against the target.

    d = g_m + Σ_k (g_k − min(0, ⟨g_k, g_m⟩)/‖g_m‖² g_m), so no auxiliary works against the target. In a step without a
    label of the target nothing is projected.

    State: none.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: needed.
    Heads: unweighted.

    References:
        Yu et al., Gradient Surgery for Multi-Task Learning, NeurIPS 2020, Algorithm 1, with a fixed target.
    """

    needs_target = True

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return the weights of the projected gradients' sum."""
        del state
        return np.ones(len(gramian)) if view.target is None else pcgrad(gramian, target=view.target)


@dataclass(frozen=True)
class GradVac(GramianMethod):
    """Gradient vaccine: g_i is turned towards every g_j whose cosine φ with it falls short of a running goal φ̂_ij.

    After the correction the cosine is φ̂; the goals follow φ̂ ← (1−β) φ̂ + β φ from 0. With goals of 0 this is PCGrad.

    Args:
        beta: β, how fast goals follow.

    State: φ̂, one number per pair of tasks.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: not needed.
    Heads: unweighted.

    References:
        Wang et al., Gradient Vaccine: Investigating and Improving Multi-task Optimization in Massively Multilingual
        Models, ICLR 2021, Algorithm 1.

    Note:
        The paper corrects layer by layer; here the shared parameters are one vector, its "whole model" variant.
    """

    beta: float = 0.01

    @classmethod
    def authors_scripts(cls) -> GradVac:
        """With β = 0.5."""
        return cls(beta=0.5)

    def start(self, setup: Setup) -> MethodState:
        """Start from goals of 0."""
        return {"goals": [[0.0] * len(setup.tasks) for _ in setup.tasks]}

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return the weights of the corrected gradients' sum, and move the goals."""
        return _vaccinate(gramian, view, state, self.beta, None)


@dataclass(frozen=True)
class TargetAwareGradVac(GramianMethod):
    """GradVac for auxiliary learning: only auxiliaries are corrected, and only towards the target.

    In a step without a label of the target nothing is corrected.

    Args:
        beta: β, how fast goals follow.

    State: φ̂, one number per pair of tasks.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: needed.
    Heads: unweighted.

    References:
        Wang et al., Gradient Vaccine: Investigating and Improving Multi-task Optimization in Massively Multilingual
        Models, ICLR 2021, Algorithm 1, with a fixed target.
    """

    needs_target = True
    beta: float = 0.01

    @classmethod
    def authors_scripts(cls) -> TargetAwareGradVac:
        """With β = 0.5."""
        return cls(beta=0.5)

    def start(self, setup: Setup) -> MethodState:
        """Start from goals of 0."""
        return {"goals": [[0.0] * len(setup.tasks) for _ in setup.tasks]}

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return the weights of the corrected gradients' sum, and move the goals."""
        return (
            np.ones(len(gramian)) if view.target is None else _vaccinate(gramian, view, state, self.beta, view.target)
        )


def _order(view: View) -> Array:
    """For every task a random order of all."""
    drawn = torch.rand(len(view.present), len(view.present), generator=view.generator, dtype=torch.float64)
    order: Array = drawn.argsort(dim=1).numpy()
    return order


def _vaccinate(gramian: Array, view: View, state: MethodState, beta: float, target: int | None) -> Array:
    goals = np.array(state["goals"])
    here = np.ix_(view.indices, view.indices)
    weights, cosines = gradvac(gramian, None if target is not None else _order(view), goals[here], target)
    goals[here] = (1 - beta) * goals[here] + beta * cosines
    state["goals"] = goals.tolist()
    return weights
