"""CAGrad: the best worst-case improvement near the average gradient."""

from __future__ import annotations

from dataclasses import dataclass

from forkmerge.methods.base import GramianMethod, MethodState, View
from forkmerge.methods.context import Array
from forkmerge.methods.solvers import Rescale, cagrad


@dataclass(frozen=True)
class CAGrad(GramianMethod):
    """Conflict-averse gradient descent: d = argmax min_k ⟨g_k, d⟩ over ‖d − g_0‖ ≤ c‖g_0‖, g_0 the mean gradient.

    Args:
        c: Radius of the ball; 0 is the mean gradient.
        rescale: "none" is the paper; "square" divides d by 1 + c², as the authors' code does in its experiments.

    State: none.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: not needed.
    Heads: unweighted.

    References:
        Liu et al., Conflict-Averse Gradient Descent for Multi-task Learning, NeurIPS 2021, Algorithm 1.

    Note:
        g_0 is the mean, so a step is about K times shorter than with equal weights.
    """

    c: float = 0.4
    rescale: Rescale = "none"

    def __post_init__(self) -> None:
        cagrad([[1.0]], self.c, self.rescale)  # refuses what it cannot use

    @classmethod
    def authors_scripts(cls) -> CAGrad:
        """With c = 0.5, divided by 1 + c²."""
        return cls(c=0.5, rescale="square")

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return the exact solution."""
        del view, state
        return cagrad(gramian, self.c, self.rescale)
