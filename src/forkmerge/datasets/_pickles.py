"""Pickled arrays, read without running anything in the file.

CIFAR-10's "Python version" is a pickle. Reading one with `pickle.load` runs whatever code it names. Here every global
name becomes an inert token; those of numpy's arrays are understood, any other is an error; and even arrays are rebuilt
from their bytes, because numpy's own reconstruction trusts flags in the file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from forkmerge.datasets._files import Array
from forkmerge.errors import ProblemError

_RECONSTRUCT = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
_FROM_BUFFER = {("numpy.core.numeric", "_frombuffer"), ("numpy._core.numeric", "_frombuffer")}
_OTHERS = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
_KINDS = {"b1": "?", **{kind: kind for kind in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8")}}


class _Refused(Exception):
    """What a file asked for and does not get."""


class _DType:
    """A dtype in a pickle: a name of a few, and a byte order."""

    def __init__(self, name: Any, *flags: Any) -> None:
        text = name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)
        if text not in _KINDS:
            raise _Refused(f"an array of dtype {text!r}")
        self.kind, self.order = _KINDS[text], "="

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("ascii", "replace") if isinstance(state[1], bytes) else str(state[1])
        if order not in ("<", ">", "|", "="):
            raise _Refused(f"the byte order {order!r}")
        self.order = order

    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self.kind).newbyteorder(self.order)  # type: ignore[arg-type]  # checked above
        return dtype


class _Array:
    """An array in a pickle, whole once its state has come."""

    value: Array | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, data = state
        self.fill(data, kind, shape, is_fortran)

    def fill(self, data: Any, kind: Any, shape: Any, is_fortran: bool) -> _Array:
        if not isinstance(kind, _DType) or not isinstance(data, bytes | bytearray):
            raise _Refused("an array whose values are not plain bytes")
        lengths = tuple(int(length) for length in shape)
        self.value = np.frombuffer(data, kind.dtype()).reshape(lengths, order="F" if is_fortran else "C")
        return self


class _Token:
    """Stands for a global name; it can be called where that is harmless, and never changed."""

    __slots__ = ("_key",)

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key

    def __call__(self, *arguments: Any) -> Any:
        if self._key in _RECONSTRUCT:
            return _Array()
        if self._key in _FROM_BUFFER:
            data, kind, shape, order = arguments
            return _Array().fill(data, kind, shape, order == "F")
        if self._key == ("numpy", "dtype"):
            return _DType(*arguments)
        if self._key == ("_codecs", "encode") and arguments[1:] in (("latin1",), ("latin-1",)):
            return str(arguments[0]).encode("latin1")
        raise _Refused(f"a call of {'.'.join(self._key)}")

    def __setstate__(self, state: Any) -> NoReturn:
        raise _Refused(f"a change of {'.'.join(self._key)}")


class _ArraysOnly(pickle.Unpickler):
    """Admits arrays, numbers, strings, lists, tuples and dicts."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a token for numpy's arrays; refuse anything else."""
        key = (module, name)
        if key in _RECONSTRUCT | _FROM_BUFFER | _OTHERS:
            return _Token(key)
        raise _Refused(f"the name {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse objects stored elsewhere."""
        raise _Refused("an object stored elsewhere")


def read_arrays(path: Path) -> dict[str, Any]:
    """Return a pickled dict of arrays, lists, strings and numbers; nothing else is admitted and no code is run.

    Args:
        path: The file. Bytes that are keys become text.
    """
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except _Refused as error:
        raise ProblemError(f"{path} holds {error}: only arrays are read from pickles. Get the file again.") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise ProblemError(f"cannot read {path}: {error or type(error).__name__}. Get the file again.") from None
    if not isinstance(content, dict):
        raise ProblemError(f"{path} holds a {type(content).__name__}: expected a dict of arrays.")
    return {_text(key): _plain(value) for key, value in content.items()}


def read_tensors(path: Path) -> tuple[Tensor, Tensor]:
    """Return the images and classes of a .pt file: a pair, or a mapping with names such as images and labels.

    torch's own restricted reader admits tensors and plain containers and runs no code.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ProblemError(f"{path} holds no tensors that can be read safely: {first}") from None
    if isinstance(content, Mapping):
        images = next((content[key] for key in ("images", "data", "x", "X") if key in content), None)
        classes = next((content[key] for key in ("labels", "targets", "y") if key in content), None)
    else:
        images, classes = content if isinstance(content, tuple | list) and len(content) == 2 else (None, None)
    if isinstance(classes, list):
        classes = torch.tensor(classes)
    if not isinstance(images, Tensor) or not isinstance(classes, Tensor):
        raise ProblemError(f"{path} must hold (images, labels), or a dict with images and labels.")
    return images, classes


def _text(key: Any) -> str:
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, _Array) else value
