"""MATLAB's MAT files of version 5, as far as numeric arrays go: what SVHN is distributed in.

A reader of our own, since scipy would be a dependency for one file format.

References:
    MathWorks, MAT-File Format, "Level 5 MAT-File Format".
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from forkmerge.datasets._files import MOST_INFLATED, Array
from forkmerge.errors import ProblemError

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = dict(zip(range(6, 16), ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"), strict=True))
_COMPLEX = 0x08
_LARGEST = 1 << 31  # bytes of a variable: the format's own limit
_HEAD = 1 << 12  # bytes that hold the type, the shape and the name of a variable
_MOST_DIMENSIONS = 32


class _BadMatFile(Exception):
    """What is wrong with a file."""


def read_mat(path: Path, names: Collection[str]) -> dict[str, Array]:
    """Return the numeric arrays of the given names in a MAT file of version 5."""
    try:
        data = memoryview(path.read_bytes())
        if len(data) < _HEADER or bytes(data[126:128]) not in (b"IM", b"MI"):
            raise _BadMatFile("it is no MAT file of version 5")
        order = "<" if bytes(data[126:128]) == b"IM" else ">"
        arrays: dict[str, Array] = {}
        for kind, content in _elements(data[_HEADER:], order):
            if kind == _COMPRESSED:
                kind, content = _inflated(content, order, names)
            if kind == _MATRIX:
                _read_matrix(content, order, names, arrays)
    except _BadMatFile as error:
        raise ProblemError(f"cannot read {path}: {error}. Get the file again.") from None
    except (OSError, StopIteration) as error:
        raise ProblemError(f"cannot read {path}: {error or 'it is cut off'}. Get the file again.") from None
    absent = [name for name in names if name not in arrays]
    if absent:
        raise ProblemError(f"{path} has no variable {', '.join(absent)}, only {', '.join(sorted(arrays)) or 'others'}.")
    return arrays


def _inflated(content: memoryview, order: str, names: Collection[str]) -> tuple[int, memoryview]:
    """Return the type and the content of a compressed element, no more of it than its own header promises.

    Only its head where nobody asks for the variable: a small file may hold any number of them.
    """
    inflate = zlib.decompressobj()
    try:
        head = inflate.decompress(content, _HEAD)
        if len(head) < 8:
            raise _BadMatFile("a compressed variable is cut off")
        kind, size = (int(word) for word in np.frombuffer(head[:8], f"{order}u4"))
        if kind == _MATRIX and _name_of(memoryview(head)[8:], order) not in names:
            return 0, memoryview(b"")
        if size > min(_LARGEST, MOST_INFLATED * len(content)):
            raise _BadMatFile(f"a compressed variable of {len(content)} bytes promises {size}, which is impossible")
        rest = inflate.decompress(inflate.unconsumed_tail, max(size + 8 - len(head), 0) + 1)
    except zlib.error as error:
        raise _BadMatFile(f"a variable is damaged ({error})") from None
    whole = memoryview(head + rest)[8:]
    if len(whole) > size:
        raise _BadMatFile(f"a compressed variable goes on after the {size} bytes that it promises")
    if len(whole) < size or not inflate.eof:
        raise _BadMatFile("a compressed variable is cut off")
    return kind, whole


def _name_of(head: memoryview, order: str) -> str | None:
    """Return the name of a variable from the first bytes of it; None where they do not hold it."""
    at = 0
    for position in range(3):  # flags, shape, name
        if at + 8 > len(head):
            return None
        first, second = (int(word) for word in np.frombuffer(head[at : at + 8], f"{order}u4"))
        start, size = (at + 4, first >> 16) if first >> 16 else (at + 8, second)
        if position == 2 and start + size <= len(head):
            return bytes(head[start : start + size]).decode("ascii", "replace")
        at += 8 if first >> 16 else 8 + size + -size % 8
    return None


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Give the type and the content of every element."""
    at = 0
    while at < len(data):
        if at + 8 > len(data):
            raise _BadMatFile("it is cut off")
        first, second = (int(word) for word in np.frombuffer(data[at : at + 8], f"{order}u4"))
        if first >> 16:  # a small element: size and type in one word, the content in the next
            kind, size, start = first & 0xFFFF, first >> 16, at + 4
            end, at = start + size, at + 8
            if size > 4:
                raise _BadMatFile("a small element is longer than it can be")
        else:
            kind, size, start = first, second, at + 8
            end = start + size
            at = end if kind == _COMPRESSED else end + -size % 8
        if end > len(data):
            raise _BadMatFile("it is cut off")
        yield kind, data[start:end]


def _read_matrix(content: memoryview, order: str, names: Collection[str], arrays: dict[str, Array]) -> None:
    parts = _elements(content, order)
    flags = _numbers(next(parts), order)
    lengths = _numbers(next(parts), order)
    if not flags.size or flags.dtype.kind == "f" or lengths.dtype.kind == "f" or (lengths < 0).any():
        raise _BadMatFile("a variable has no type or an impossible shape")
    if len(lengths) > _MOST_DIMENSIONS:
        raise _BadMatFile(f"a variable has {len(lengths)} dimensions")
    shape = [int(length) for length in lengths]
    name = bytes(next(parts)[1]).decode("ascii", "replace")
    if name not in names:
        return
    if name in arrays:
        raise _BadMatFile(f"variable {name!r} is there twice")
    kind = int(flags[0]) & 0xFF
    if kind not in _CLASSES or int(flags[0]) >> 8 & _COMPLEX:
        raise _BadMatFile(f"variable {name!r} is no array of real numbers")
    values = _numbers(next(parts), order)
    if values.size != math.prod(shape):
        raise _BadMatFile(f"variable {name!r} has {values.size} values for the shape {shape}")
    arrays[name] = values.reshape(shape, order="F").astype(_CLASSES[kind], copy=False)


def _numbers(element: tuple[int, memoryview], order: str) -> Array:
    kind, content = element
    if kind not in _TYPES or len(content) % int(_TYPES[kind][1]):
        raise _BadMatFile(f"an element of type {kind} stands where numbers are expected")
    return np.frombuffer(content, order + _TYPES[kind])
