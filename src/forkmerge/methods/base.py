"""What a method is: how the tasks of one branch are combined in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from forkmerge.errors import ProblemError
from forkmerge.methods.context import Array, MethodContext, Setup
from forkmerge.problem.randomness import derive

Where = Literal["parameters", "representation", "summed_representation"]
"""Where gradients are compared: at the shared parameters; at the declared representation, example by example, or summed
over the batch."""
MethodState = dict[str, Any]
"""Numbers, lists and tensors: saved with the branch, never merged."""


@dataclass(frozen=True)
class View:
    """What a method sees in a step. Tasks without a label, or with a loss that is not finite, are left out.

    Args:
        setup: What it knew before.
        present: Positions in `setup.tasks` of the K tasks of this step, ascending.
        raw_losses: Their losses, times the branch's task weights, [K].
        step: The global step.
        lr: The model's current learning rate; a tensor where the optimizer keeps it as one.
        seed: Of this step's randomness for the method.
        context: Extra passes through the model, should the method need some.
    """

    setup: Setup
    present: tuple[int, ...]
    raw_losses: Array | Tensor
    step: int
    lr: float | Tensor
    seed: int
    context: MethodContext

    @cached_property
    def losses(self) -> Array:
        """The losses as numbers. A loss method gets a tensor, and would make the host wait if it asked for them."""
        raw = self.raw_losses
        return raw.double().cpu().numpy() if isinstance(raw, Tensor) else raw

    @cached_property
    def generator(self) -> torch.Generator:
        """Randomness of this step, a CPU generator."""
        return torch.Generator().manual_seed(derive(self.seed, "generator"))

    @property
    def probe(self) -> MethodContext:
        """What `context` was called before."""
        return self.context

    @property
    def target(self) -> int | None:
        """Position of the target among the K tasks of this step; None if it has no label here."""
        if self.setup.target is None or self.setup.target not in self.present:
            return None
        return self.present.index(self.setup.target)

    @property
    def indices(self) -> list[int]:
        """`present` as a list, to index arrays and tensors over all tasks with."""
        return list(self.present)


class Method(ABC):  # noqa: B024 - its three kinds below have the abstract method
    """How the tasks of one branch are combined. A frozen dataclass of options; what changes is in the state.

    The docstring of a method is its data sheet: `facts_of` reads the lines State, Passes, Memory, Target and Heads
    and the References from it, and the table of methods is made of them.

    Attributes:
        needs_target: Whether the method treats the target differently; a branch without it is then refused.
        weighs_heads: Whether parameters that only one task reaches get weighted gradients, too.
        gradients: Where gradients are compared; None follows `fit(gradients=…)`.
    """

    needs_target: ClassVar[bool] = False
    weighs_heads: ClassVar[bool] = False
    gradients: Where | None = None

    @classmethod
    def originals(cls) -> Method:
        """The method as its own paper has it: the defaults."""
        return cls()

    @classmethod
    def authors_scripts(cls) -> Method:
        """The method as ForkMerge's authors compare with it in their scripts; what those do not change is the same."""
        return cls()

    def start(self, setup: Setup) -> MethodState:
        """Return the state before the first step."""
        del setup
        return {}

    def before_step(self, context: MethodContext, state: MethodState) -> None:  # noqa: B027 - optional
        """Look ahead, with extra passes, once the step's batches are read and before its forward pass."""

    def after_step(self, context: MethodContext, state: MethodState) -> None:  # noqa: B027 - optional
        """Look back after the optimizer's step."""


class LossMethod(Method):
    """Weights that do not depend on this step's gradients: one backward pass, over the weighted sum of losses.

    Losses and weights are tensors on the model's device, in the precision of `precise`, and nothing is read back to
    the host in a step. So whether all is finite is looked at after a segment of steps; if not, the segment is done
    again from a copy of the branch, and every step leaves out the tasks that spoil it.
    """

    weighs_heads: ClassVar[bool] = True

    @abstractmethod
    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        """Return the weights of the losses [K], given the losses, both [K]."""


class GramianMethod(Method):
    """Weights that depend on the Gramian of the tasks' gradients."""

    @abstractmethod
    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return the weights [K] of the shared gradients, given G_ij = ⟨g_i, g_j⟩; a zero gradient has a zero row."""

    def head_weights(self, weights: Array, view: View, state: MethodState) -> Array | None:
        """Return the weights of the heads' gradients; None leaves them as they are."""
        del view, state
        return weights if self.weighs_heads else None


class MatrixMethod(Method):
    """A direction computed from the whole matrix of gradients."""

    @abstractmethod
    def direction(self, matrix: Tensor, view: View, state: MethodState) -> Tensor:
        """Return the direction [n] from the gradients [K, n]."""


def check_where(gradients: Where | None) -> None:
    """Refuse an unknown place to compare gradients at."""
    if gradients is not None and gradients not in get_args(Where):
        raise ProblemError(f"gradients must be {', '.join(get_args(Where))} or None, got {gradients!r}.")


def has_hook(method: Method, name: str) -> bool:
    """Whether a method implements `before_step` or `after_step`."""
    return getattr(type(method), name) is not getattr(Method, name)


def precise(device: torch.device) -> torch.dtype:
    """The type that methods compute in: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def constant(value: float, setup: Setup) -> Tensor:
    """Return a number for every task of the branch, where losses live."""
    return torch.full((len(setup.tasks),), value, dtype=precise(setup.device), device=setup.device)


def adam(
    state: MethodState,
    name: str,
    gradient: Tensor,
    lr: float | Tensor,
    *,
    weight_decay: float = 0.0,
    beta2: float = 0.999,
) -> None:
    """Take one Adam step on the vector `state[name]`, its moments in the state (Kingma and Ba, 2015, Alg. 1).

    An entry whose gradient is NaN stays as it is, its moments and its count of steps too: a task without a label.
    """
    values: Tensor = state[name]
    averages: Tensor | None = state.get(f"{name}_adam")
    if averages is None:
        averages = values.new_zeros(4, len(values))
    slope = gradient.add(values, alpha=weight_decay) if weight_decay else gradient
    one = torch.ones_like(slope)
    # Running averages of the gradient, its square, and of 1, by which both are divided for their start at 0.
    new = torch.lerp(
        torch.stack([slope, slope * slope, one, one]), averages, _rates(beta2, values.dtype, values.device)
    )
    first, second, first_weight, second_weight = new.unbind()
    moved = values - lr * (first / first_weight).div_((second / second_weight).sqrt_().add_(1e-8))
    has_gradient = gradient == gradient  # not NaN
    state[name] = torch.where(has_gradient, moved, values)
    state[f"{name}_adam"] = torch.where(has_gradient, new, averages)


@lru_cache(maxsize=16)
def _rates(beta2: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([[0.9], [beta2], [0.9], [beta2]], dtype=dtype, device=device)


def pick(values: Tensor, view: View) -> Tensor:
    """Return the values of this step's K tasks, out of one per task of the branch."""
    return values if len(view.present) == len(view.setup.tasks) else values[view.indices]


def spread(values: Tensor, view: View) -> Tensor:
    """Spread the values of this step's K tasks over all tasks of the branch, the others at NaN."""
    if len(view.present) == len(view.setup.tasks):
        return values
    result = values.new_full((len(view.setup.tasks),), torch.nan)
    result[view.indices] = values
    return result
