"""What a process gives back to the operating system: freed memory, and rows that nobody reads for a while."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

SMALLEST = 1 << 20  # bytes: less is not worth the trouble


def give_back(freed: int) -> None:
    """Return freed memory to the operating system, where about `freed` bytes make it worth a call of milliseconds.

    The C library keeps what is freed between two blocks in use, so that gradients freed before a merge would still
    count, and the merge's own row be added to them. Only glibc has such a call.
    """
    if freed >= SMALLEST:
        _trim()(0)


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], object]:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim or (lambda _: None)


class Attic:
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

    def rest(self) -> None:
        """Let go of the memory; the next read brings it back from the file."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)
