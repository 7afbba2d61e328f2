"""What a method may look at around a step: other batches, other weights, and gradients it does not see otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Array = npt.NDArray[np.float64]
Which = Literal["this", "second", "validation"]
"""A step's own batch; another one of the training data; one of the target's validation data."""
Direction = Sequence["Tensor | None"]
"""A vector over all trainable parameters, part by part; None is zero."""


@dataclass(frozen=True)
class Setup:
    """What a method knows before the first step.

    Args:
        tasks: All tasks of the branch, the target first where it takes part.
        target: Position of the target in `tasks`; None where the branch does not train it.
        epoch: Steps of one pass over the target's training data.
        device: Where losses live.
    """

    tasks: tuple[str, ...]
    target: int | None
    epoch: int
    device: torch.device


class MethodContext(Protocol):
    """Extra passes that leave no trace: in training mode, with randomness of their own, moving no running statistics.

    Attributes:
        step: The global step.
        setup: The tasks.
    """

    step: int
    setup: Setup

    @property
    def lr(self) -> float:
        """The model's current learning rate."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters."""

    def losses(self, which: Which = "this") -> Tensor:
        """Return the weighted losses of all tasks at the current weights; NaN stands for a task without a label."""

    def gradient(self, weights: Mapping[int, float | Tensor], which: Which = "this") -> list[Tensor | None]:
        """Return ∇ Σ w_i L_i for every trainable parameter, at the current weights."""

    def gramian(self, which: Which = "this") -> tuple[list[int], Array]:
        """Return the tasks that have a label and the Gramian of their gradients on shared parameters.

        For loss methods, which see no gradients otherwise.
        """

    def products(self, direction: Direction) -> Array | None:
        """Return ⟨g_k, v⟩ over the shared parameters, for the gradients of the K tasks that the method sees, [K].

        None where gradients are compared at the representation.
        """

    def cross_gramian(self, present: Sequence[int], which: Which = "second") -> Array:
        """Return ⟨g_i, h_j⟩ for the gradients of this step and those of another batch, [K, K]; not symmetric.

        A task without a label in the other batch has a column of zeros.
        """

    def descent(self, gradient: Direction) -> list[Tensor | None]:
        """Return m + g + wd·θ: what the optimizer's momentum and weight decay make of a gradient, without its rate."""

    def at_own_rates(self, direction: Direction) -> list[Tensor | None]:
        """Scale every part by its parameter group's learning rate over `lr`: 1 where there is one group."""

    def moved(self, direction: Direction, scale: float | Tensor) -> AbstractContextManager[None]:
        """Work at θ + scale·direction; the weights come back bit for bit."""

    def add_noise(self, deviation: float) -> None:
        """Add Gaussian noise to all trainable parameters, for good."""
