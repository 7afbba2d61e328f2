"""What a process gives back to the operating system: freed memory, and rows that nobody reads for a while."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from forkmerge.engine.training.state import State

_MMAP_THRESHOLD = -3  # glibc's name for: larger blocks get a mapping of their own
SMALLEST = 1 << 20  # bytes: less is not worth the trouble
LARGE = 1 << 25  # bytes: blocks above this have mappings of their own anyway


def give_back(freed: int) -> None:
    """Return freed memory to the operating system, where about `freed` bytes make it worth a call of milliseconds.

    The C library keeps what is freed between two blocks in use, so that gradients freed before a merge would still
    count, and the merge's own row be added to them. Only glibc has such a call.
    """
    trim = _libc("malloc_trim") if freed >= SMALLEST else None
    if trim is not None:
        trim(0)


@contextmanager
def thrifty(size: int) -> Iterator[None]:
    """Let no gaps grow in the C library's heap while a model of `size` bytes is trained, if that is much.

    Tensors of the size of large layers come and go in every step, and what lies between them would stay with the
    process: up to a model size. In mappings of their own they go back to the system one by one. That adds about one
    percent to a large model's step and more to a small one's, so small ones are left alone. Afterwards the limit is the
    highest that glibc chooses by itself.
    """
    is_users_own = "MALLOC_MMAP_THRESHOLD_" in os.environ  # whoever has set the limit of the process keeps it
    option = _libc("mallopt") if size >= LARGE and not is_users_own else None
    if option is None:
        yield
        return
    option(_MMAP_THRESHOLD, 1 << 21)
    try:
        yield
    finally:
        option(_MMAP_THRESHOLD, 1 << 25)


@cache
def _libc(name: str) -> Callable[..., object] | None:
    """Return a function of glibc; None where the C library is another."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


class MappedRows:
    """Rows in mapped files: ordinary tensors, but the system may take their memory while nobody reads them.

    Args:
        folder: Where the files lie; they have no name and vanish with the process. None keeps rows in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder if hasattr(os, "posix_fallocate") else None
        self._maps: list[mmap.mmap] = []

    def hold(self, row: Tensor) -> Tensor:
        """Return a copy of the row, in a mapped file where that is possible."""
        if self._folder is None or row.device.type != "cpu" or row.nbytes < SMALLEST:
            return row.clone()
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # Room is reserved now: writing to a mapped file on a full disk would end the process.
                os.posix_fallocate(file.fileno(), 0, row.nbytes)
                mapped = mmap.mmap(file.fileno(), row.nbytes)
        except OSError:
            return row.clone()
        self._maps.append(mapped)
        return torch.frombuffer(mapped, dtype=row.dtype).copy_(row)

    def copy(self, state: State) -> State:
        """Return a copy of the weights that need not stay in memory while nobody reads them."""
        rows = {name: self.hold(row) for name, row in state.rows.items()}
        return State(state.step, rows, {name: buffer.clone() for name, buffer in state.buffers.items()})

    def rest(self) -> None:
        """Let go of the memory; the next read brings it back from the file."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)
