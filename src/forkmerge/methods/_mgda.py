"""MGDA: the shortest convex combination of the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from forkmerge.errors import ProblemError
from forkmerge.methods.base import GramianMethod, MethodState, View, Where, check_where
from forkmerge.methods.context import Array
from forkmerge.methods.solvers import min_norm, min_norm_frank_wolfe


@dataclass(frozen=True)
class MGDA(GramianMethod):
    """Multiple-gradient descent: d = Σ w_k g_k with w = argmin ‖Σ w_k g_k‖² over w ≥ 0, Σw = 1.

    With `fit(gradients="representation")` the gradients are those at the declared representation: MGDA-UB, the
    paper's cheaper upper bound.

    Args:
        normalize: What each gradient is divided by before weights are sought: "none", its norm ("l2"), the task's
            "loss", or both ("loss+"). The weights then multiply the gradients as they were.
        solver: "exact", or the original's truncated "frank_wolfe".
        iterations: The most Frank-Wolfe steps.
        gradients: Where gradients are compared: at the "parameters", at the "representation", or there summed over the
            batch, "summed_representation"; None follows `fit(gradients=…)`.

    State: none.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: not needed.
    Heads: unweighted.

    References:
        Sener and Koltun, Multi-Task Learning as Multi-Objective Optimization, NeurIPS 2018, Eq. 3 and Algorithm 2.

    Note:
        A task with gradient zero is left out; by the letter it would take all the weight and stop the training. The
        authors' code also multiplies the heads' gradients by w; the paper's Algorithm 2 does not.
    """

    normalize: Literal["none", "l2", "loss", "loss+"] = "none"
    solver: Literal["exact", "frank_wolfe"] = "exact"
    iterations: int = 250
    gradients: Where | None = None

    def __post_init__(self) -> None:
        if self.normalize not in ("none", "l2", "loss", "loss+"):
            raise ProblemError(f"normalize must be none, l2, loss or loss+, got {self.normalize!r}.")
        if self.solver not in ("exact", "frank_wolfe"):
            raise ProblemError(f"solver must be exact or frank_wolfe, got {self.solver!r}.")
        check_where(self.gradients)

    @classmethod
    def authors_scripts(cls) -> MGDA:
        """Truncated, at the representation, whose gradients are summed over the batch."""
        return cls(solver="frank_wolfe", gradients="summed_representation")

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return the weights of the shortest vector in the convex hull."""
        del state
        divisors = np.ones(len(gramian))
        if self.normalize in ("l2", "loss+"):
            divisors = np.sqrt(np.diagonal(gramian))
        if self.normalize in ("loss", "loss+"):
            divisors = divisors * np.abs(view.losses)
        divisors = np.where(divisors > 0, divisors, 1.0)
        scaled = gramian / divisors / divisors[:, None]
        return min_norm(scaled) if self.solver == "exact" else min_norm_frank_wolfe(scaled, self.iterations)
