"""What a method is: how the tasks of one branch are combined in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from forkmerge.probe import Probe

Array = npt.NDArray[np.float64]
MethodState = dict[str, Any]
"""Tensors, numbers and lists: saved with the branch, never merged."""


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


@dataclass(frozen=True)
class View:
    """What a method sees in a step. Tasks without a label in this step are left out.

    Args:
        setup: What it knew before.
        present: Positions in `setup.tasks` of the K tasks of this step, ascending.
        losses: Their losses, weighted by the branch's task weights, detached, [K].
        step: The global step.
        lr: The model's current learning rate.
        generator: Randomness of this step, a CPU generator.
    """

    setup: Setup
    present: tuple[int, ...]
    losses: Tensor
    step: int
    lr: float
    generator: torch.Generator

    @property
    def target(self) -> int | None:
        """Position of the target among the K tasks of this step; None if it has no label here."""
        if self.setup.target is None or self.setup.target not in self.present:
            return None
        return self.present.index(self.setup.target)


class Method(ABC):  # noqa: B024 - its three kinds below have the abstract method
    """How the tasks of one branch are combined. A frozen dataclass of options; what changes is in the state.

    Attributes:
        needs_target: Whether the method treats the target differently.
        paper: Reference with the equation or algorithm number.
        passes: Extra forward and backward passes a step, in words.
        memory: Extra memory in units of parameters, in words.
        weighs_heads: Whether heads get weighted gradients, too.
    """

    needs_target: ClassVar[bool] = False
    weighs_heads: ClassVar[bool] = False
    paper: ClassVar[str] = ""
    passes: ClassVar[str] = ""
    memory: ClassVar[str] = ""

    def start(self, setup: Setup) -> MethodState:
        """Return the state before the first step."""
        del setup
        return {}

    def before_step(self, probe: Probe, state: MethodState) -> None:  # noqa: B027 - optional
        """Look ahead, with extra passes, before the step's gradients are combined."""

    def after_step(self, probe: Probe, state: MethodState) -> None:  # noqa: B027 - optional
        """Look back after the optimizer's step."""


class LossMethod(Method):
    """Weights that depend on losses alone: one backward pass, no read-back from the device."""

    weighs_heads: ClassVar[bool] = True

    @abstractmethod
    def weights(self, view: View, state: MethodState) -> Tensor:
        """Return the weights, [K], on the losses' device."""


class GramianMethod(Method):
    """Weights that depend on the Gramian of the tasks' gradients."""

    @abstractmethod
    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return the weights [K] of the shared gradients, given G_ij = ⟨g_i, g_j⟩."""


class MatrixMethod(Method):
    """A direction computed from the whole matrix of gradients."""

    @abstractmethod
    def direction(self, matrix: Tensor, view: View, state: MethodState) -> Tensor:
        """Return the direction [n] from the gradients [K, n]."""


def has_hook(method: Method, name: str) -> bool:
    """Whether a method implements `before_step` or `after_step`."""
    return getattr(type(method), name) is not getattr(Method, name)


def full(values: Sequence[float] | Array, present: Sequence[int], size: int, default: float = 0.0) -> Array:
    """Spread the values of this step's tasks over all tasks."""
    result = np.full(size, default)
    result[list(present)] = values
    return result


def adam(
    state: MethodState, name: str, gradient: Tensor, lr: float, weight_decay: float = 0.0, beta2: float = 0.999
) -> None:
    """Take one Adam step on `state[name]`, keeping the moments in the state (Kingma and Ba, 2015, Alg. 1)."""
    value: Tensor = state[name]
    step = state.get(name + "_step", 0) + 1
    if weight_decay:
        gradient = gradient + weight_decay * value
    first = 0.9 * state.get(name + "_m", torch.zeros_like(value)) + 0.1 * gradient
    second = beta2 * state.get(name + "_v", torch.zeros_like(value)) + (1 - beta2) * gradient**2
    update = (first / (1 - 0.9**step)) / ((second / (1 - beta2**step)).sqrt() + 1e-8)
    state.update({name: value - lr * update, name + "_m": first, name + "_v": second, name + "_step": step})
