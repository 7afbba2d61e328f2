"""MATLAB's MAT files of version 5, as far as numeric arrays go: what SVHN is distributed in.

A reader of our own, since scipy would be a dependency for one file format.

References:
    MathWorks, MAT-File Format, "Level 5 MAT-File Format".
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from forkmerge.datasets._files import Array
from forkmerge.errors import ProblemError

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = dict(zip(range(6, 16), ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"), strict=True))
_COMPLEX = 0x08
_LARGEST = 1 << 31  # bytes of a variable: the format's own limit, so that a small file cannot fill the memory


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
                kind, content = next(_elements(_inflated(content), order))
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


def _inflated(content: memoryview) -> memoryview:
    inflate = zlib.decompressobj()
    try:
        result = inflate.decompress(content, _LARGEST)
    except zlib.error as error:
        raise _BadMatFile(f"a variable is damaged ({error})") from None
    if not inflate.eof:
        raise _BadMatFile("a compressed variable is cut off")
    return memoryview(result)


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
    shape = [int(length) for length in lengths]
    name = bytes(next(parts)[1]).decode("ascii", "replace")
    if name not in names:
        return
    kind = int(flags[0]) & 0xFF
    if kind not in _CLASSES or int(flags[0]) >> 8 & _COMPLEX:
        raise _BadMatFile(f"variable {name!r} is no array of real numbers")
    values = _numbers(next(parts), order)
    if values.size != np.prod(shape, dtype=np.int64):
        raise _BadMatFile(f"variable {name!r} has {values.size} values for the shape {shape}")
    arrays[name] = values.reshape(shape, order="F").astype(_CLASSES[kind], copy=False)


def _numbers(element: tuple[int, memoryview], order: str) -> Array:
    kind, content = element
    if kind not in _TYPES or len(content) % int(_TYPES[kind][1]):
        raise _BadMatFile(f"an element of type {kind} stands where numbers are expected")
    return np.frombuffer(content, order + _TYPES[kind])
