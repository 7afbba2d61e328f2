"""How values become JSON without pickle.

`pack` and `unpack` are exact inverses: nested plain data as strict JSON, its tensors apart. `plain` is the
lossy, more readable form for records.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forkmerge.errors import StoreError

JSON = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None

# What JSON cannot say becomes {"$": kind, "v": payload}; so does a caller's own dict with a key "$".
_TAG = "$"
_DICTS: dict[type, str] = {dict: "dict", defaultdict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_DEEPEST = 100  # so that neither JSON nor `unpack` meets Python's recursion limit later


def pack(value: Any) -> tuple[JSON, dict[str, Tensor]]:
    """Split `value` into strict JSON (`allow_nan=False`) and the tensors taken out of it.

    None, bool, int, float, str, list, tuple, dict (keys of any packable type), OrderedDict, Counter,
    torch.dtype and torch.device come back from `unpack` exactly, float bits included. A defaultdict comes
    back as a dict, a numpy scalar as a Python number, a parameter as a tensor. A tensor met twice is taken
    out once and comes back as one tensor. The returned tensors share the caller's memory.

    Raises:
        StoreError: something else was met; the message holds its path within `value` and its type.
    """
    packer = _Packer()
    return packer.pack(value, ""), packer.tensors


def unpack(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the value from which `pack` made `data` and `tensors`."""
    if isinstance(data, list):
        return [unpack(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: unpack(item, tensors) for key, item in data.items()}
    kind, payload = data[_TAG], data.get("v")
    try:
        if kind in ("tensor", "complex"):
            tensor = tensors[str(payload)]
            return tensor if kind == "tensor" else torch.view_as_complex(tensor)
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](unpack(payload, tensors))
        return _LEAVES[kind](payload)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
        raise StoreError(f"cannot decode the saved {kind!r} {payload!r:.80}: {error!r}.") from error


def plain(value: Any, path: str = "") -> JSON:
    """Strict JSON for people and other programs: what `record.jsonl` and `result.json` hold.

    Numbers that are not finite become null, tuples lists, dataclasses dicts, integer keys strings, numpy scalars
    Python numbers.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int)):
                raise _refuse(_below(path, key), key, "cannot be a key; give text or an integer")
        return {str(key): plain(item, _below(path, key)) for key, item in value.items()}
    raise _refuse(path, value, "cannot be recorded; give numbers, text, lists or dicts")


def encode(data: JSON | Mapping[str, Any], indent: int | None = None) -> bytes:
    """Encode `data` as strict JSON, on one line unless `indent` is given."""
    return json.dumps(data, allow_nan=False, indent=indent, separators=(",", ": ")).encode() + b"\n"


def as_read(data: Any) -> Any:
    """Return data as it will be read back from JSON."""
    return json.loads(encode(plain(data)))


def seal(data: dict[str, JSON]) -> bytes:
    """Encode `data` together with its own sha256."""
    return encode({"sha256": hashlib.sha256(encode(data)).hexdigest(), "content": data})


class _Packer:
    """One call of `pack`: the tensors taken out so far and the tags left in their places."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._tags: dict[int, JSON] = {}  # by identity of the caller's tensor, alive during the call

    def pack(self, value: Any, path: str, depth: int = 0) -> JSON:
        if depth > _DEEPEST:
            raise StoreError(f"{path:.60}…: nested more than {_DEEPEST} deep. Does it contain itself?")
        if isinstance(value, np.generic):
            value = value.item()
        kind = type(value)
        if value is None or kind is bool:
            return bool(value) if kind is bool else None
        if kind is int:  # Python refuses to print or read very long decimal integers
            return int(value) if value.bit_length() <= 64 else _tag("int", hex(value))
        if kind is float:  # the bits, because a NaN carries a sign and a payload
            return float(value) if math.isfinite(value) else _tag("float", struct.pack(">d", value).hex())
        if kind is str:
            return str(value) if _survives_json(value) else _tag("str", [ord(char) for char in value])
        if kind in (list, tuple):
            items = [self.pack(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
            return items if kind is list else _tag("tuple", items)
        if kind in _DICTS:
            return self._pack_dict(value, path, depth + 1)
        if isinstance(value, Tensor):
            return self._pack_tensor(value, path)
        if kind in (torch.dtype, torch.device):
            return _tag(kind.__name__, str(value))
        hint = "keep it out, or put numbers, text, lists, dicts or tensors in its place"
        raise _refuse(path, value, f"cannot be saved without pickle; {hint}")

    def _pack_dict(self, value: Mapping[Any, Any], path: str, depth: int) -> JSON:
        kind = _DICTS[type(value)]
        if kind == "dict" and all(type(key) is str and key != _TAG and _survives_json(key) for key in value):
            return {key: self.pack(item, _below(path, key), depth) for key, item in value.items()}
        pairs: list[JSON] = []
        for key, item in value.items():
            below = _below(path, key)
            pairs.append([self.pack(key, f"{below} (the key)", depth), self.pack(item, below, depth)])
        return _tag(kind, pairs)

    def _pack_tensor(self, value: Tensor, path: str) -> JSON:
        if id(value) in self._tags:
            return self._tags[id(value)]
        unusual = value.is_meta or value.is_quantized or value.is_nested or value.layout != torch.strided
        if unusual or type(value) not in (Tensor, torch.nn.Parameter):
            where = f"of layout {value.layout} on {value.device}"
            raise _refuse(path, value, f"{where} cannot be saved; make it an ordinary dense tensor")
        name = path.encode("ascii", "backslashreplace").decode() or "value"
        while name in self.tensors or name == "__metadata__":  # safetensors keeps that one
            name = f"{name}#{len(self.tensors)}"
        tensor = value.detach()
        # Not every complex dtype exists in safetensors.
        self.tensors[name] = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        self._tags[id(value)] = _tag("complex" if tensor.is_complex() else "tensor", name)
        return self._tags[id(value)]


def _tag(kind: str, payload: JSON) -> JSON:
    return {_TAG: kind, "v": payload}


def _survives_json(text: str) -> bool:
    """Tell whether JSON keeps `text`: a high surrogate before a low one comes back as one character."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _below(path: str, key: object) -> str:
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r:.40}]"


def _refuse(path: str, value: object, why: str) -> StoreError:
    kind = type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return StoreError(f"{path or 'the value'}: {article} {kind} {why}.")


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),
    "float": lambda bits: struct.unpack(">d", bytes.fromhex(bits))[0],
    "str": lambda points: "".join(map(chr, points)),
    "dtype": {str(item): item for item in vars(torch).values() if isinstance(item, torch.dtype)}.__getitem__,
    "device": torch.device,
}
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
