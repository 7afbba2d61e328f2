"""Pickled arrays, read without running anything in the file.

CIFAR-10's "Python version" is a pickle. Reading one with `pickle.load` runs whatever code it names. Here every global
name becomes an inert token; those of numpy's arrays are understood, any other is an error; and even arrays are rebuilt
from their bytes, because numpy's own reconstruction trusts flags in the file. The operations of a pickle are done one
by one, by a reader of our own: Python's own takes a number in the file for the size of a table, and hashes keys that
hold themselves twice, and twice again.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
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
_MOST_OPERATIONS = 1_000_000  # of a pickle; a file of CIFAR-10 has some 50,000
_KINDS = {"b1": "?", **{kind: kind for kind in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8")}}


class _Refused(Exception):
    """What a file asked for and does not get."""


class _DType:
    """A dtype in a pickle: a name of a few, and a byte order."""

    def __init__(self, name: Any, *flags: Any) -> None:
        text = _text(name)
        if text not in _KINDS:
            raise _Refused(f"an array of dtype {text[:20]!r}")
        self.kind, self.order = _KINDS[text], "="

    def __setstate__(self, state: Any) -> None:
        order = _text(state[1])[:20]
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
        if self._key == ("_codecs", "encode") and len(arguments) == 2 and _text(arguments[1]) in ("latin1", "latin-1"):
            return _text(arguments[0]).encode("latin1")
        raise _Refused(f"a call of {'.'.join(self._key)}")

    def __setstate__(self, state: Any) -> NoReturn:
        raise _Refused(f"a change of {'.'.join(self._key)}")


class _Machine:
    """Does the operations of a pickle of arrays, numbers, strings, lists, tuples and dicts.

    Args:
        size: Bytes of the file; more cannot come out of it.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def load(self, data: bytes) -> Any:
        """Return what a pickle holds."""
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count == _MOST_OPERATIONS:
                raise _Refused(f"more than {_MOST_OPERATIONS} operations")
            self._do(operation.name, argument)
        return self._stack[-1]

    def _do(self, name: str, argument: Any) -> None:
        if name in _IGNORED:
            return
        if name in _VALUES:
            self._stack.append(_VALUES[name](argument))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self._stack.append(self._memo[argument])
        elif (method := getattr(self, f"_{name.lower()}", None)) is not None and name in _OPERATIONS:
            method()
        elif name in ("PERSID", "BINPERSID"):
            raise _Refused("an object stored elsewhere")
        elif name == "GLOBAL":
            self._stack.append(_token(*argument.split(" ", 1)))
        else:
            raise _Refused(f"the operation {name}")

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _popped(self) -> list[Any]:
        """Everything since the last mark."""
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _tuple(self) -> None:
        items = tuple(self._popped())
        self._stack.append(items)

    def _tuple1(self) -> None:
        self._stack[-1:] = [(self._stack[-1],)]

    def _tuple2(self) -> None:
        self._stack[-2:] = [(self._stack[-2], self._stack[-1])]

    def _tuple3(self) -> None:
        self._stack[-3:] = [(self._stack[-3], self._stack[-2], self._stack[-1])]

    def _list(self) -> None:
        items = self._popped()
        self._stack.append(items)

    def _dict(self) -> None:
        items = self._popped()
        self._stack.append({})
        self._set(items)

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        items = self._popped()
        self._extend(items)

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise _Refused("an entry of what is no list")
        self._stack[-1].extend(items)

    def _setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _setitems(self) -> None:
        items = self._popped()
        self._set(items)

    def _set(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not dict:
            raise _Refused("an entry of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in _SCALARS:
                raise _Refused(f"a {type(key).__name__} as a key")
            self._stack[-1][key] = value

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(_token(_text(module), _text(name)))

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Token) or type(arguments) is not tuple:
            raise _Refused("a call of what is no name")
        made = function(*arguments)
        self._left -= len(made) if isinstance(made, bytes) else 0
        if self._left < 0:
            raise _Refused("calls that make more bytes than it has")
        self._stack.append(made)

    def _build(self) -> None:
        state = self._stack.pop()
        if not isinstance(self._stack[-1], _Array | _DType | _Token):
            raise _Refused(f"a change of a {type(self._stack[-1]).__name__}")
        self._stack[-1].__setstate__(state)

    def _pop(self) -> None:
        self._stack.pop()

    def _dup(self) -> None:
        self._stack.append(self._stack[-1])


_IGNORED = {"PROTO", "FRAME", "STOP"}
_SCALARS = (str, bytes, int, float, bool, type(None))
_OPERATIONS = {
    *("MARK", "MEMOIZE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "DICT", "APPEND", "APPENDS", "SETITEM"),
    *("SETITEMS", "STACK_GLOBAL", "REDUCE", "BUILD", "POP", "DUP"),
}
_VALUES: dict[str, Callable[[Any], Any]] = {
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
    "EMPTY_TUPLE": lambda _: (),
    # Python 2's strings are bytes; the list of operations knows them as text.
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), lambda text: text.encode("latin1")),
    **dict.fromkeys(
        (
            *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE"),
            *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        ),
        lambda value: value,
    ),
}


def _token(module: str, name: str) -> _Token:
    """Return a token for a name of numpy's arrays; refuse any other."""
    if (module, name) not in _RECONSTRUCT | _FROM_BUFFER | _OTHERS:
        raise _Refused(f"the name {module}.{name}")
    return _Token((module, name))


def read_arrays(path: Path) -> dict[str, Any]:
    """Return a pickled dict of arrays, lists, strings and numbers; nothing else is admitted and no code is run.

    Args:
        path: The file. Bytes that are keys become text.
    """
    try:
        data = path.read_bytes()
        content = _Machine(len(data)).load(data)
    except _Refused as error:
        raise ProblemError(f"{path} holds {error}: only arrays are read from pickles. Get the file again.") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise ProblemError(f"cannot read {path}: {error or type(error).__name__}. Get the file again.") from None
    if not isinstance(content, dict):
        raise ProblemError(f"{path} holds a {type(content).__name__}: expected a dict of arrays.")
    if odd := next((type(key).__name__ for key in content if not isinstance(key, str | bytes)), None):
        raise ProblemError(f"{path} holds a dict with a key that is a {odd}: expected the names of arrays.")
    named = {key if isinstance(key, str) else key.decode("utf-8", "replace"): item for key, item in content.items()}
    return {name: _plain(path, name, value) for name, value in named.items()}


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


def _text(value: Any) -> str:
    """Return what has to be text; only that is ever printed."""
    if type(value) is bytes:
        return value.decode("ascii", "replace")
    if type(value) is not str:
        raise _Refused(f"a {type(value).__name__} where text is expected")
    return value


def _plain(path: Path, key: str, value: Any) -> Any:
    """Return an array, a scalar or a list of scalars; what lies deeper may hold itself many times over."""
    if isinstance(value, _Array):
        return value.value
    flat = value if isinstance(value, list | tuple) else [value]
    odd = next((type(item).__name__ for item in flat if type(item) not in (*_SCALARS, bytearray)), None)
    if odd is not None:
        raise ProblemError(
            f"{path} holds a {odd} in {key[:50]!r}: expected arrays, numbers, strings and lists of them."
        )
    return value
