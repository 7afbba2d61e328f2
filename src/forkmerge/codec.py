"""How values become bytes and files without pickle.

`pack` and `unpack` are exact inverses: nested plain data as strict JSON, its tensors apart. `plain` is the
lossy, more readable form for records. The second half writes, syncs, verifies and reads single files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forkmerge.errors import StoreError

JSON = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None

# What JSON cannot say becomes {"$": kind, "v": payload}; so does a caller's own dict with a key "$".
_TAG = "$"
_DICTS: dict[type, str] = {dict: "dict", defaultdict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_DEEPEST = 100  # so that neither JSON nor `unpack` meets Python's recursion limit later
TEMPORARY = ".tmp-"  # how the name of anything unfinished begins


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
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, struct.error) as error:
        raise StoreError(f"cannot decode the saved {kind!r} {payload!r:.80}: {error!r}.") from error


def plain(value: Any, path: str = "") -> JSON:
    """Strict JSON for people and other programs: what `record.jsonl` and `result.json` hold.

    Numbers that are not finite become null, tuples lists, integer keys strings, numpy scalars Python numbers.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int)):
                raise _refuse(_below(path, key), key, "cannot be a key; give text or an integer")
        return {str(key): plain(item, _below(path, key)) for key, item in value.items()}
    raise _refuse(path, value, "cannot be recorded; give numbers, text, lists or dicts")


def encode(data: JSON, indent: int | None = None) -> bytes:
    """Encode `data` as strict JSON, on one line unless `indent` is given."""
    return json.dumps(data, allow_nan=False, indent=indent, separators=(",", ": ")).encode() + b"\n"


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


class Damage(Exception):
    """A file is not what was once written; the message names it and says why."""


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn what the operating system refuses into a StoreError that says what was tried."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot {doing}: {_reason(error)}.") from error


# Every change of the disk passes through the next four functions, which is where tests put their faults.


def write(file: BinaryIO, data: bytes) -> None:
    """Hand `data` to the operating system; `sync` makes it outlive a power cut."""
    file.write(data)
    file.flush()


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def _fsync(descriptor: int) -> None:
    os.fsync(descriptor)


def _rename(source: Path, target: Path) -> None:
    os.replace(source, target)


def sync(file: BinaryIO) -> None:
    """Wait until all of `file` is on the disk."""
    _fsync(file.fileno())


def write_file(path: Path, data: bytes) -> None:
    """Write and sync a new file."""
    with path.open("wb") as file:
        write(file, data)
        sync(file)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write and sync a safetensors file; only strided, overlapping or remote tensors are copied meanwhile."""
    separate: dict[str, Tensor] = {}
    ends: dict[torch.device, int] = {}
    try:
        dense = {name: t.detach().resolve_conj().resolve_neg().contiguous() for name, t in tensors.items()}
        # safetensors refuses tensors that overlap; neighbouring views of one row do not.
        for name, tensor in sorted(dense.items(), key=lambda item: item[1].data_ptr()):
            overlaps = tensor.data_ptr() < ends.get(tensor.device, 0)
            separate[name] = tensor.clone() if overlaps else tensor
            if not overlaps:
                ends[tensor.device] = tensor.data_ptr() + tensor.nbytes
        _save_tensors(path, separate)
    except (KeyError, ValueError, RuntimeError) as error:
        raise StoreError(f"{path.name} cannot hold these tensors: {error}.") from error
    with path.open("rb+") as file:
        sync(file)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk (Windows does that by itself)."""
    if os.name != "nt":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            _fsync(descriptor)
        finally:
            os.close(descriptor)


def move(source: Path, target: Path) -> None:
    """Give a finished file or folder its name, for good."""
    _rename(source, target)
    sync_folder(target.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file `path` by `data`: after a kill it holds either the old bytes or the new ones."""
    temporary = path.with_name(TEMPORARY + path.name)
    with explained(f"write {path}"):
        write_file(temporary, data)
        move(temporary, path)


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove `folder`, if there is one, never leaving half of it under its name."""
    if folder.exists():
        rubbish = folder.with_name(f"{TEMPORARY}old-{folder.name}")
        remove(rubbish)
        _rename(folder, rubbish)
        remove(rubbish)


def fingerprint(path: Path) -> dict[str, JSON]:
    """Return the sha256 and the size of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"sha256": digest.hexdigest(), "bytes": path.stat().st_size}


def verify(folder: Path, files: Mapping[str, Mapping[str, JSON]]) -> None:
    """Raise Damage unless each of `files` has the fingerprint it had when it was written."""
    for name, expected in files.items():
        try:
            found = fingerprint(folder / name)
        except OSError as error:
            raise Damage(f"{name}: {_reason(error)}") from error
        if found["bytes"] != expected["bytes"]:
            raise Damage(f"{name}: it holds {found['bytes']} bytes, {expected['bytes']} expected")
        if found != expected:
            raise Damage(f"{name}: its sha256 has changed")


def unseal(path: Path) -> dict[str, Any]:
    """Read a file whose bytes `seal` made; raise Damage if a single bit differs."""
    try:
        text = path.read_bytes()
        content = json.loads(text)["content"]
        if seal(content) != text:
            raise ValueError("it does not match its own checksum")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Damage(f"{path.name}: {_reason(error)}") from error
    return dict(content)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into main memory; nothing refers to the file afterwards."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise Damage(f"{path.name}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
