"""Standard output and error that nobody reads, or that are full: what is printed is lost, and the work is not.

A pipe whose reader has gone, a full disk, a terminal that was closed, or descriptors that were closed from the start.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NAMES = ("stdin", "stdout", "stderr")


class TolerantFile(io.FileIO):
    """A file descriptor that takes whatever is written, also when it can do so no more.

    Attributes:
        lost: Why something was not written; None as long as all was.
    """

    lost: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Write what can be written, and drop the rest."""
        if self.lost is None:
            try:
                return super().write(data)
            except OSError as error:
                self.lost = error
        return memoryview(data).nbytes


def tolerant(stream: TextIO) -> TextIO:
    """Return a text stream to the same descriptor as another, which tolerates what that one would raise."""
    try:
        descriptor = stream.fileno()
        stream.flush()
    except (OSError, ValueError):  # no file at all; or broken already, as the first writing will show again
        if not isinstance(stream, io.TextIOWrapper) or stream.closed:
            return stream
        descriptor = stream.fileno()
    file = TolerantFile(descriptor, "w", closefd=False)
    at_once, by_line = (bool(getattr(stream, name, False)) for name in ("write_through", "line_buffering"))
    return io.TextIOWrapper(
        io.BufferedWriter(file, 1) if at_once else io.BufferedWriter(file),  # a buffer of one byte holds nothing back
        stream.encoding,
        stream.errors,
        line_buffering=by_line,
        write_through=at_once,
    )


def tolerate_lost_output() -> None:
    """Let this process print as before, but never fail by it.

    Descriptors that are closed are opened on nothing: the next file to be opened would take their numbers, and get
    what libraries print.
    """
    for number, name in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            if number and opened == number:
                setattr(sys, name, _discarding(number))
            continue
        stream = getattr(sys, name)
        if number and stream is not None:
            setattr(sys, name, tolerant(stream))


def lost_output(stream: TextIO | None) -> OSError | None:
    """Return why something that was printed did not get through, if so; what is still held back is written first."""
    file = getattr(getattr(stream, "buffer", None), "raw", None)
    if not isinstance(file, TolerantFile):
        return None
    cast(TextIO, stream).flush()
    return file.lost


def _discarding(number: int) -> TextIO:
    """Return a stream in place of one that was closed: whatever is printed is lost."""
    file = _Closed(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="backslashreplace")


class _Closed(TolerantFile):
    """A descriptor that was closed before anybody could write to it."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Drop it."""
        self.lost = OSError(errno.EBADF, os.strerror(errno.EBADF))
        return memoryview(data).nbytes
