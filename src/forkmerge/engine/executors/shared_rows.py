"""The rows of branches in memory that worker processes share, so that only counters travel.

A worker never writes to the rows a call starts from. It works in spare rows, which become the branch's own once the
call has ended; until then the call can be made again, by anybody, whatever happened to the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from forkmerge.engine.executors.shared_memory import Memory
from forkmerge.engine.executors.state_bytes import Key, rows_of, with_rows
from forkmerge.engine.training.state import State

Rows = dict[Key, Tensor]
"""The rows of one state, each of which fills a memory and keeps it."""
Address = dict[Key, tuple[str, torch.dtype]]
"""Rows as other processes find them: `{row: (key of the memory, dtype)}`."""


class SharedRows:
    """The coordinator's side: all memory that rows are in, and spare ones.

    Memory is known by where it begins, so a row that lies there needs no copy, whoever holds it.

    Args:
        spares: How many spare states' rows are kept for later; one per worker.
    """

    def __init__(self, spares: int) -> None:
        self.spares = spares
        self.alive: WeakValueDictionary[str, Memory] = WeakValueDictionary()
        self._by_start: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._free: list[Memory] = []
        self._rows_per_state = 0

    def share(self, state: State) -> Rows:
        """Return a state's rows in shared memory, where those of a state on the CPU stay from then on."""
        shared: Rows = {}
        for key, row in rows_of(state).items():
            if self._memory_of(row) is not None:
                shared[key] = row
                continue
            shared[key] = self._take(row.numel(), row.dtype).copy_(row)
            if row.device.type == "cpu":
                getattr(state, key[0])[key[1]] = shared[key]
        return shared

    def spare(self, rows: Rows) -> Rows:
        """Return rows like these, of any content."""
        return {key: self._take(row.numel(), row.dtype) for key, row in rows.items()}

    def adopt(self, memories: Iterable[Memory]) -> None:
        """Get to know memory that a worker has made."""
        for memory in memories:
            self.alive[memory.key] = self._by_start[memory.start] = memory

    def find(self, address: Address) -> Rows:
        """Return the rows at an address."""
        return {key: self.alive[name].tensor(dtype) for key, (name, dtype) in address.items()}

    def address_of(self, rows: Rows) -> Address:
        """Return where other processes find rows."""
        return {key: (self._by_start[row.data_ptr()].key, row.dtype) for key, row in rows.items()}

    def install(self, state: State, rows: Rows) -> None:
        """Let a state have these rows; those it had become spare. Rows on other devices are written to instead."""
        before, after = rows_of(state), dict(rows)
        for key, row in rows.items():
            old = before.get(key)
            if old is not None and old.device.type != "cpu" and (old.dtype, old.shape) == (row.dtype, row.shape):
                after[key] = old.copy_(row)
                before[key] = row
        with_rows(state, after)
        self.give_back(before)

    def give_back(self, rows: Rows) -> None:
        """Keep the memory of rows, where it is shared, for the next ones, as far as there may be need."""
        self._rows_per_state = max(self._rows_per_state, len(rows))
        for row in rows.values():
            memory = self._memory_of(row)
            if memory is None or memory in self._free:
                continue
            if sum(len(free) == len(memory) for free in self._free) < self.spares * self._rows_per_state:
                self._free.append(memory)

    def unknown(self, keys: set[str], rows: Iterable[Rows]) -> list[Memory]:
        """Return the memory of rows that a process does not know by these keys."""
        used = {row.data_ptr(): self._by_start[row.data_ptr()] for each in rows for row in each.values()}
        return [memory for memory in used.values() if memory.key not in keys]

    def _memory_of(self, row: Tensor) -> Memory | None:
        memory = self._by_start.get(row.data_ptr()) if row.device.type == "cpu" else None
        return memory if memory is not None and len(memory) == row.nbytes else None

    def _take(self, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        memory = next((free for free in self._free if len(free) == size), None)
        if memory is None:
            memory = Memory(size)
            self.adopt([memory])
        else:
            self._free.remove(memory)
        return memory.tensor(dtype)


class WorkerRows:
    """A worker's side: the shared memory it has mapped."""

    def __init__(self) -> None:
        self._memories: dict[str, Memory] = {}

    def note(self, memories: Iterable[Memory], gone: Iterable[str]) -> None:
        """Get to know new memory, and forget what is gone."""
        for key in gone:
            self._memories.pop(key, None)
        self._memories.update({memory.key: memory for memory in memories})

    def find(self, address: Address) -> Rows:
        """Return the rows at an address."""
        return {key: self._memories[name].tensor(dtype) for key, (name, dtype) in address.items()}

    def publish(self, rows: Mapping[Key, Tensor], address: Address) -> tuple[Address, list[Memory]]:
        """Write rows to where they belong at an address, others to new memory; return where all of them are."""
        shared, made = self.find(address), []
        result: Address = {}
        for key, row in rows.items():
            target = shared.get(key)
            if target is None or target.dtype != row.dtype or target.numel() != row.numel():
                memory = Memory(row.nbytes)
                made.append(memory)
                target = memory.tensor(row.dtype)
                result[key] = (memory.key, row.dtype)
            else:
                result[key] = address[key]
            if target.data_ptr() != row.data_ptr():
                target.copy_(row)
        self.note(made, ())
        return result, made
