"""The rows of branches in memory that worker processes share, so that only counters travel.

A worker never writes to the rows a segment starts from. It trains in spare rows, which become the branch's own once
the segment has ended; until then the segment can be done again, by anybody, whatever happened to the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary, ref

import safetensors.torch
import torch
from torch import Tensor

from forkmerge.engine.executors.shared_memory import Memory
from forkmerge.engine.storage.json_codec import pack, unpack
from forkmerge.engine.training.state import State

Key = tuple[str, str]
"""A row of a state: the field that holds it, and its name there."""
_FIELDS = ("rows", "optimizer_rows")


@dataclass(frozen=True)
class Shared:
    """A row in shared memory."""

    memory: Memory
    tensor: Tensor

    @classmethod
    def on(cls, memory: Memory, dtype: torch.dtype) -> Shared:
        """Return the row that fills a memory."""
        return cls(memory, memory.tensor(dtype))


Slot = dict[Key, Shared]
"""The rows of one state."""
Address = dict[Key, tuple[str, torch.dtype]]
"""A slot as other processes find it: `{row: (key of the memory, dtype)}`."""


def rows_of(state: State) -> dict[Key, Tensor]:
    """Return the rows of a state: all of it that is large."""
    return {(field, name): row for field in _FIELDS for name, row in getattr(state, field).items()}


def with_rows(state: State, rows: Mapping[Key, Tensor]) -> State:
    """Give a state these rows, and only these, in place."""
    for field in _FIELDS:
        setattr(state, field, {name: row for (where, name), row in rows.items() if where == field})
    return state


def address_of(slot: Slot) -> Address:
    """Return where other processes find a slot."""
    return {key: (row.memory.key, row.tensor.dtype) for key, row in slot.items()}


class SharedRows:
    """The coordinator's shared rows: which state has which, and spare ones.

    Args:
        spares: How many spare rows of a size are kept for later; one per worker.
    """

    def __init__(self, spares: int) -> None:
        self.spares = spares
        self.alive: WeakValueDictionary[str, Memory] = WeakValueDictionary()
        # By identity, with a weak reference: a new state may get the address of one that is gone.
        self._slots: dict[int, tuple[ref[State], Slot]] = {}
        self._free: list[Memory] = []

    def place(self, state: State) -> Slot:
        """Return a state's rows in shared memory, where those of a state on the CPU stay from then on."""
        slot, rows = self._slot_of(state), rows_of(state)
        for key in [key for key in slot if key not in rows]:
            self._free.append(slot.pop(key).memory)
        for key, row in rows.items():
            held = slot.get(key)
            if held is None or held.tensor.nbytes != row.nbytes or held.tensor.dtype != row.dtype:
                held = slot[key] = self._take(row.numel(), row.dtype)
            if held.tensor is not row:
                held.tensor.copy_(row)
                if row.device.type == "cpu":
                    getattr(state, key[0])[key[1]] = held.tensor
        return slot

    def spare(self, slot: Slot) -> Slot:
        """Return rows like those of a slot, of any content."""
        return {key: self._take(row.tensor.numel(), row.tensor.dtype) for key, row in slot.items()}

    def adopt(self, memories: Iterable[Memory]) -> None:
        """Get to know memory that a worker has made."""
        self.alive.update({memory.key: memory for memory in memories})

    def find(self, address: Address) -> Slot:
        """Return the slot at an address."""
        return {key: Shared.on(self.alive[name], dtype) for key, (name, dtype) in address.items()}

    def install(self, state: State, slot: Slot) -> None:
        """Let a state have these rows; those it had become spare."""
        old = self._slot_of(state)
        with_rows(state, {key: row.tensor for key, row in slot.items()})
        self._slots[id(state)] = (self._slots[id(state)][0], slot)
        self.give_back(old)

    def give_back(self, slot: Slot) -> None:
        """Keep the rows of a slot for the next one, as far as there may be need."""
        for row in slot.values():
            if sum(memory.size == row.memory.size for memory in self._free) < self.spares * len(slot):
                self._free.append(row.memory)

    def unknown(self, knows: set[str], slots: Iterable[Slot]) -> list[Memory]:
        """Return the memory of slots that a process does not know yet."""
        used = {row.memory.key: row.memory for slot in slots for row in slot.values()}
        return [memory for key, memory in used.items() if key not in knows]

    def _slot_of(self, state: State) -> Slot:
        known = self._slots.get(id(state))
        if known is not None and known[0]() is state:
            return known[1]
        slot: Slot = {}
        place = id(state)
        self._slots[place] = (ref(state, lambda gone: self._drop(place, gone)), slot)
        return slot

    def _drop(self, place: int, gone: ref[State]) -> None:
        if place in self._slots and self._slots[place][0] is gone:
            del self._slots[place]

    def _take(self, count: int, dtype: torch.dtype) -> Shared:
        size = count * dtype.itemsize
        found = next((memory for memory in self._free if memory.size == size), None)
        if found is None:
            found = Memory(size)
            self.alive[found.key] = found
        else:
            self._free.remove(found)
        return Shared.on(found, dtype)


class WorkerRows:
    """A worker's side: the shared memory it has mapped."""

    def __init__(self) -> None:
        self._known: dict[str, Memory] = {}

    def note(self, memories: Iterable[Memory], gone: Iterable[str]) -> None:
        """Get to know new memory, and forget what is gone."""
        for key in gone:
            self._known.pop(key, None)
        self._known.update({memory.key: memory for memory in memories})

    def find(self, address: Address) -> dict[Key, Tensor]:
        """Return the rows at an address."""
        return {key: self._known[name].tensor(dtype) for key, (name, dtype) in address.items()}

    def publish(self, rows: Mapping[Key, Tensor], address: Address) -> tuple[Address, list[Memory]]:
        """Write rows to their place at an address, those without one to new memory; return where all of them are."""
        found, made = self.find(address), []
        result: Address = {}
        for key, row in rows.items():
            there = found.get(key)
            if there is None or there.dtype != row.dtype or there.numel() != row.numel():
                memory = Memory(row.nbytes)
                made.append(memory)
                there = memory.tensor(row.dtype)
                result[key] = (memory.key, row.dtype)
            else:
                result[key] = address[key]
            if there.data_ptr() != row.data_ptr():
                there.copy_(row)
        self.note(made, ())
        return result, made


def to_wire(state: State) -> tuple[Any, bytes]:
    """Return a state as plain JSON data and bytes."""
    value, tensors = pack(state.to_value())
    return value, safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})


def from_wire(wire: tuple[Any, bytes]) -> State:
    """Return the state that `to_wire` described."""
    value, data = wire
    return State.from_value(unpack(value, safetensors.torch.load(data)))


def rest_to_wire(state: State) -> tuple[Any, bytes]:
    """Return all of a state but its rows."""
    return to_wire(replace(state, rows={}, optimizer_rows={}))
