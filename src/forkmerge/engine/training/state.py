"""A branch's tensors as flat rows.

All trainable parameters of one dtype live in one contiguous row; so do optimizer tensors of a parameter's shape.
A branch at rest is a `State`; a `ModelBinding` lends it to a module and an optimizer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from forkmerge.engine.training.remote_rows import RemoteRows
from forkmerge.engine.training.shards import is_sharded, local_of, plain_name, reshard, wrapper_prefix
from forkmerge.errors import ProblemError

_PIECE = 1 << 20  # elements
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load of the CPUs in use


@dataclass(frozen=True)
class RowSlice:
    """Where one parameter lies: its row, its offset there, and how a slice of the row becomes the tensor."""

    name: str
    row: str
    offset: int
    shape: tuple[int, ...]
    channels_last: bool

    def view(self, row: Tensor) -> Tensor:
        """Return this parameter's view of a row."""
        flat = row[self.offset : self.offset + math.prod(self.shape)]
        if self.channels_last:
            o, i, h, w = self.shape
            return flat.view(o, h, w, i).permute(0, 3, 1, 2)
        return flat.view(self.shape)


class Layout:
    """Where a model's trainable parameters lie in rows, tied ones once: of sharded ones, what is on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self.slices: list[RowSlice] = []
        self.parameters: list[nn.Parameter] = []
        self.sizes: dict[str, int] = {}
        first_device: torch.device | None = None
        reshard(model)  # while FSDP2 holds whole weights, these are the module's parameters
        self.wrapper = wrapper_prefix(model)
        for name, whole in model.named_parameters():
            if not whole.requires_grad:
                continue
            parameter = local_of(whole)
            first_device = first_device or parameter.device
            row = str(parameter.dtype).removeprefix("torch.")
            if parameter.device != first_device:
                row += f"@{parameter.device}"
            step = _ALIGNMENT // parameter.element_size() or 1
            offset = -(-self.sizes.get(row, 0) // step) * step
            last = (
                parameter.dim() == 4
                and not parameter.is_contiguous()
                and parameter.is_contiguous(memory_format=torch.channels_last)
            )
            self.slices.append(RowSlice(plain_name(name, self.wrapper), row, offset, tuple(parameter.shape), last))
            self.parameters.append(whole)
            self.sizes[row] = offset + parameter.numel()
        self.is_sharded = any(is_sharded(parameter) for parameter in self.parameters)

    def new_row(self, row: str, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return a row of zeros for the given parameters' row."""
        return torch.zeros(self.sizes[row], dtype=dtype, device=like.device)

    @property
    def nbytes(self) -> int:
        """The size of all trainable parameters, as far as they are on this rank."""
        return sum(local_of(parameter).nbytes for parameter in self.parameters)

    @property
    def signature(self) -> dict[str, list[int]]:
        """Names and whole shapes, to tell whether a stored state fits this model."""
        return {s.name: list(p.shape) for s, p in zip(self.slices, self.parameters, strict=True)}


@dataclass
class State:
    """A branch at rest: everything that training changes, and nothing else.

    Args:
        step: Global steps done.
        rows: Parameter rows by name.
        buffers: The buffers that differ from the module's own.
        optimizer_rows: Optimizer tensors of a parameter's shape, as `{"slot/row": row}`.
        optimizer_slots: `{"slot/row": parameter positions that have this slot}`.
        optimizer_loose: The rest of the optimizer's state by parameter position (step counts and the like).
        groups: The optimizer's parameter groups without their parameters.
        scheduler: The learning-rate scheduler's state.
        scaler: The gradient scaler's state.
        method: The state of the method that combines tasks; a branch's own, never merged.
    """

    step: int
    rows: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    optimizer_rows: MutableMapping[str, Tensor] = field(default_factory=dict)
    optimizer_slots: dict[str, list[int]] = field(default_factory=dict)
    optimizer_loose: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scheduler: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)

    def clone(self) -> State:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def weights(self) -> State:
        """Return a copy of what the model computes with: parameters and buffers, no optimizer state."""
        return State(self.step, copy.deepcopy(self.rows), copy.deepcopy(self.buffers))

    def take_weights(self, other: State) -> None:
        """Overwrite parameters and buffers, in place, with those of another state."""
        for name, row in self.rows.items():
            row.copy_(other.rows[name])
        self.buffers = copy.deepcopy(other.buffers)

    def reset_optimizer(self) -> None:
        """Forget the optimizer's tensors; learning rates and schedule stay."""
        self.optimizer_rows, self.optimizer_slots, self.optimizer_loose = {}, {}, {}

    def forget(self) -> None:
        """Forget everything that a diverged step may have spoiled besides the weights."""
        self.reset_optimizer()
        self.method = {}

    def restore(self, other: State) -> None:
        """Become another state, keeping the memory of the parameter rows."""
        for name, row in self.rows.items():
            row.copy_(other.rows[name])
        for item in fields(self):
            if item.name != "rows":
                setattr(self, item.name, getattr(other, item.name))

    def is_finite(self, *, optimizer: bool = False) -> bool:
        """Whether no parameter, nor the optimizer's memory if asked for, is infinite or NaN."""
        rows, others = list(self.rows.values()), self.optimizer_rows if optimizer else {}
        if isinstance(others, RemoteRows) and not others.is_here:
            others = {} if others.are_finite else others.here
        rows += others.values()
        # In pieces: on a whole row the test's own temporaries would be the peak of a run's memory.
        return all(_is_finite(piece) for row in rows for piece in row.split(_PIECE))

    def to_value(self) -> dict[str, Any]:
        """Return plain nested data (with tensors) for the store."""
        value = {item.name: getattr(self, item.name) for item in fields(self)}
        rows = self.optimizer_rows
        return {**value, "optimizer_rows": rows.here if isinstance(rows, RemoteRows) else rows}

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> State:
        """Return the state that `to_value` described."""
        return cls(**value)


def _is_finite(values: Tensor) -> bool:
    if not values.is_floating_point() and not values.is_complex():
        return True
    # A sum is the cheapest look; it may overflow where no entry is infinite.
    total = torch.sum(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return bool(total.isfinite()) or bool(values.isfinite().all())


def check_same_parameters(signatures: Sequence[dict[str, list[int]]], names: Sequence[str]) -> None:
    """Refuse to merge branches whose parameters differ, naming the first difference."""
    first = signatures[0]
    for name, other in zip(names[1:], signatures[1:], strict=True):
        for key in (*first, *other):
            if first.get(key) != other.get(key):
                raise ProblemError(
                    f"branches {names[0]!r} and {name!r} have different parameters: {key!r} is "
                    f"{first.get(key, 'missing')} in one and {other.get(key, 'missing')} in the other."
                )


@dataclass(frozen=True)
class StateSizes:
    """Bytes: trainable parameters, optimizer state and changed buffers of one branch, and what is never forked."""

    weights: int
    optimizer: int
    buffers: int
    fixed: int
