"""Memory that several processes map, and messages that carry it.

It has no name: only open files hold it, so whatever dies, even all processes at once, nothing is left behind.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from forkmerge.engine.executors.resources import is_shortage, shortage

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load of the CPUs in use
_SMALL = 1 << 16  # bytes; smaller tensors travel inside the message
_FILES = 100  # per system call; the kernels' own limits are about 250


class Memory(mmap.mmap):
    """Bytes shared by processes, zero at first; they stay mapped, and open for others, as long as a tensor uses them.

    Args:
        size: How many.
        file: The open file that holds them, taken over; None makes a new one.
        key: How all processes call it.
        private: Whether what this process writes is seen by nobody else.

    Attributes:
        start: Where it is mapped here.
    """

    file: int
    key: str
    start: int

    def __new__(cls, size: int, file: int | None = None, key: str = "", *, private: bool = False) -> Memory:
        """Map the bytes, or raise a `ResourceError`."""
        try:
            file = _nameless_file(size) if file is None else file
            try:
                self = super().__new__(cls, file, size, access=mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE)
            except BaseException:
                os.close(file)
                raise
        except (OSError, MemoryError) as error:
            if is_shortage(error):
                raise shortage(f"{size} bytes cannot be shared with workers", error) from error
            raise
        finalize(self, os.close, file)
        self.file, self.key = file, key or secrets.token_hex(8)
        self.start = self.tensor(torch.uint8).data_ptr()
        return self

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Return the bytes as a flat tensor, which keeps the memory."""
        return torch.frombuffer(self, dtype=dtype)


def _nameless_file(size: int) -> int:
    if hasattr(os, "memfd_create"):  # Linux; unlike /dev/shm, no container limits its size to 64 MB
        file = os.memfd_create("forkmerge", os.MFD_CLOEXEC)
    else:
        import _posixshmem  # type: ignore[import-not-found]  # what multiprocessing.shared_memory is made of; it would keep the name

        name = f"/fm-{secrets.token_hex(8)}"
        file = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        _posixshmem.shm_unlink(name)
    try:
        os.ftruncate(file, size)
    except BaseException:
        os.close(file)
        raise
    return file


def send(connection: Connection[Any, Any], value: Any, memories: Sequence[Memory] = ()) -> None:
    """Send a value that pickles, and memory with it, to the process at the other end of a duplex pipe."""
    connection.send_bytes(pickle.dumps((value, [(memory.key, len(memory)) for memory in memories])))
    with _socket_of(connection) as channel:
        for start in range(0, len(memories), _FILES):
            socket.send_fds(channel, [b"."], [memory.file for memory in memories[start : start + _FILES]])


def receive(connection: Connection[Any, Any], *, private: bool = False) -> tuple[Any, list[Memory]]:
    """Return what the other end sent.

    Raises:
        EOFError: It has died; so does OSError say.
        ResourceError: There is no memory, or no open file left, for what came.
    """
    data = connection.recv_bytes()
    value, described = pickle.loads(data)  # noqa: TID251 - from our own process, never from a file
    memories: list[Memory] = []
    with _socket_of(connection) as channel:
        for start in range(0, len(described), _FILES):
            part = described[start : start + _FILES]
            sent, files, _, _ = socket.recv_fds(channel, 1, len(part))
            if len(files) != len(part):
                for file in files:
                    os.close(file)
                # The kernel leaves out what this process may not open.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) if sent else EOFError
            memories += _mapped(part, files, private)
    return value, memories


def _mapped(described: Sequence[tuple[str, int]], files: Sequence[int], private: bool) -> list[Memory]:
    memories: list[Memory] = []
    try:
        for (key, size), file in zip(described, files, strict=True):
            memories.append(Memory(size, file, key, private=private))
    except BaseException:
        for file in files[len(memories) + 1 :]:  # each memory owns its own, also one that could not be mapped
            os.close(file)
        raise
    return memories


def _socket_of(connection: Connection[Any, Any]) -> socket.socket:
    channel = socket.socket(fileno=os.dup(connection.fileno()))
    channel.setblocking(True)  # a default timeout of the user's must not reach the pipe
    return channel


class Parcel:
    """An object that pickles, kept in memory from which any number of processes can make it again.

    Large tensors and arrays are not copied there: processes read the same pages, until one of them writes.

    Attributes:
        interactive: The names in it that no other process can import, as they were typed in an interactive session.
    """

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        pickled, self.interactive = _Writer.dumps(value, buffers.append)
        pieces = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end = -(-(end + piece.nbytes) // _ALIGNMENT) * _ALIGNMENT
        self.places = [(start, piece.nbytes) for start, piece in zip(starts, pieces, strict=True)]
        self.memory = Memory(end)
        for (start, size), piece in zip(self.places, pieces, strict=True):
            self.memory[start : start + size] = piece

    @staticmethod
    def open(places: Sequence[tuple[int, int]], memory: Memory) -> Any:
        """Make the object again, from what `receive` gave."""
        whole = memoryview(memory)
        pickled, *buffers = (whole[start : start + size] for start, size in places)
        return pickle.loads(pickled, buffers=buffers)  # noqa: TID251 - from our own process, never from a file


class _Writer(pickle.Pickler):
    """Pickles with large tensors out of band, as numpy's arrays are."""

    interactive: list[str]
    is_script: bool

    @classmethod
    def dumps(cls, value: Any, keep: Callable[[pickle.PickleBuffer], Any]) -> tuple[bytes, list[str]]:
        file = io.BytesIO()
        writer = cls(file, protocol=5, buffer_callback=keep)
        writer.interactive, writer.is_script = [], _can_import_main()
        writer.dump(value)
        return file.getvalue(), writer.interactive

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__" and not self.is_script:
            self.interactive.append(value.__qualname__)
        if type(value) is not Tensor or value.device.type != "cpu" or value.nbytes < _SMALL:
            return NotImplemented
        if value.layout != torch.strided or not value.is_contiguous() or value.requires_grad or vars(value):
            return NotImplemented
        if value.is_conj() or value.is_neg() or value.is_quantized:
            return NotImplemented
        raw: Any = value.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape))


def _can_import_main() -> bool:
    """Whether other processes can run the main module again: a script or `-m`, but no notebook and no prompt."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return getattr(spec, "name", None) is not None or (file is not None and os.path.isfile(file))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
