"""States as plain data and bytes, for other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import safetensors.torch
from torch import Tensor

from forkmerge.engine.storage.json_codec import pack, unpack
from forkmerge.engine.training.state import State

Wire = tuple[Any, bytes]
"""A state as plain JSON data and the bytes of its tensors."""
Key = tuple[str, str]
"""A row of a state: the field that holds it, and its name there."""
_ROWS = ("rows", "optimizer_rows")


def to_wire(state: State) -> Wire:
    """Return a state as plain JSON data and bytes."""
    value, tensors = pack(state.to_value())
    return value, safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})


def from_wire(wire: Wire) -> State:
    """Return the state that `to_wire` described."""
    value, data = wire
    return State.from_value(unpack(value, safetensors.torch.load(data)))


def rest_to_wire(state: State) -> Wire:
    """Return all of a state but its rows."""
    return to_wire(replace(state, rows={}, optimizer_rows={}))


def rows_of(state: State) -> dict[Key, Tensor]:
    """Return the rows of a state: all of it that is large."""
    return {(field, name): row for field in _ROWS for name, row in getattr(state, field).items()}


def with_rows(state: State, rows: Mapping[Key, Tensor]) -> State:
    """Give a state these rows, and only these, in place."""
    for field in _ROWS:
        setattr(state, field, {name: row for (where, name), row in rows.items() if where == field})
    return state


def take_rest(state: State, other: State) -> None:
    """Overwrite all of a state but its rows."""
    for item in fields(State):
        if item.name not in _ROWS:
            setattr(state, item.name, getattr(other, item.name))
