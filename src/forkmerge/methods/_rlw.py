"""RLW: random weights in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forkmerge.errors import ProblemError
from forkmerge.methods.base import LossMethod, MethodState, View


@dataclass(frozen=True)
class RLW(LossMethod):
    """Random loss weighting: weights drawn anew in every step, which sum to 1.

    Args:
        distribution: "normal" and "uniform" put numbers of N(0, 1) or U(0, 1) through a softmax; "dirichlet" is
            uniform on the simplex.

    State: none.
    Passes: none beyond the step's own.
    Memory: a copy of the branch in training.
    Target: not needed.
    Heads: weighted like the rest.

    References:
        Lin et al., Reasonable Effectiveness of Random Weighting, TMLR 2022, Section 3.

    Note:
        The weights sum to 1, so a step is on average K times shorter than with equal weights.
    """

    distribution: Literal["normal", "uniform", "dirichlet"] = "normal"

    def __post_init__(self) -> None:
        if self.distribution not in ("normal", "uniform", "dirichlet"):
            raise ProblemError(f"distribution must be normal, uniform or dirichlet, got {self.distribution!r}.")

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        """Return the step's draw."""
        del state
        return self._drawn(len(losses), view.generator).to(losses, non_blocking=True)

    def _drawn(self, size: int, generator: torch.Generator) -> Tensor:
        if self.distribution == "normal":
            drawn = torch.randn(size, generator=generator, dtype=torch.float64)
        else:
            drawn = torch.rand(size, generator=generator, dtype=torch.float64)
        if self.distribution == "dirichlet":
            drawn = -torch.log1p(-drawn)
            return drawn / drawn.sum() if drawn.sum() > 0 else torch.full_like(drawn, 1 / size)
        return torch.softmax(drawn, 0)
