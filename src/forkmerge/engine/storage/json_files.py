"""JSON files that hold their own checksum: what was changed since it was written is named, and never shown as a fact.

A file is an object with a last key "sha256", a line of a record one with a last key "crc32": each the checksum of the
object without it, on one line. People may indent a file as they like. What earlier versions wrote has no such key.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forkmerge.engine.storage.atomic_files import explained, write_atomically
from forkmerge.engine.storage.json_codec import JSON, encode, plain
from forkmerge.errors import StoreError

_DEEPEST = 500  # what `pack` makes is less deep, and nothing below it meets Python's recursion limit
_CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "sha256": lambda text: hashlib.sha256(text).hexdigest(),
    "crc32": lambda text: f"{zlib.crc32(text):08x}",
}


def with_checksum(data: Mapping[str, Any], kind: str = "sha256") -> dict[str, JSON]:
    """Return an object of plain data with its checksum of a kind as the last key."""
    return {**data, kind: checksum(data, kind)}


def checksum(data: Mapping[str, Any], kind: str = "sha256") -> str:
    """Return the checksum of an object."""
    return _CHECKSUMS[kind](encode(data))


def parse(text: bytes, name: str) -> Any:
    """Return what a JSON text holds; the error begins with its name."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{name} is not JSON: {error}.") from None
    level, depth = [data], 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        if depth > _DEEPEST:
            raise StoreError(f"{name} is nested more than {_DEEPEST} deep.")
        level = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
    return data


def parse_object(text: bytes, name: str, kind: str = "sha256") -> dict[str, Any]:
    """Return the object in a JSON text, which has to match its own checksum if it has one."""
    data = parse(text, name)
    if not isinstance(data, dict):
        raise StoreError(f"{name} holds no JSON object.")
    # One damaged bit in the name of the checksum must not make it a file of an earlier version, which has none.
    last = next(reversed(data), kind)
    expected = data.pop(kind, None)
    try:
        if expected is None and isinstance(data.get(last), str):
            is_whole = data[last] != checksum({key: data[key] for key in data if key != last}, kind)
        else:
            is_whole = expected is None or expected == checksum(data, kind)
    except ValueError:  # NaN or Infinity, which we never write
        is_whole = False
    if not is_whole:
        raise StoreError(f"{name} is damaged: it does not match its own checksum.")
    return data


def is_torn(line: bytes) -> bool:
    """Whether a kill has cut off the end of a line; one that is whole but for another last byte is damaged instead."""
    if line.endswith(b"\n"):
        return False
    try:
        json.loads(line[:-1])
    except (ValueError, RecursionError):
        return True
    return False


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, without its checksum."""
    with explained(f"read {path}"):
        text = path.read_bytes()
    return parse_object(text, str(path))


def write_object(path: Path, data: Mapping[str, Any]) -> None:
    """Write an object of plain data with its checksum, in a form that people can read."""
    write_atomically(path, encode(with_checksum(data), 2))


@contextmanager
def interpreting(name: object, what: str) -> Iterator[None]:
    """Say that a file or folder is not what it should be, whatever comes of taking it for that."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise StoreError(f"{name} is not {what}: {reason}.") from error


def write_versioned(path: Path, version: int, content: Mapping[str, Any]) -> None:
    """Write a JSON file that begins with its format's version, and make its folder."""
    with explained(f"make the folder {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_object(path, {"format": version, **{key: plain(value, key) for key, value in content.items()}})


def read_versioned(path: Path, version: int, keys: Iterable[str], what: str, remedy: str = "") -> dict[str, Any]:
    """Return a JSON file that begins with its format's version.

    Args:
        path: The file.
        version: The version that can be read.
        keys: What it must hold besides.
        what: What the file should be, for the error.
        remedy: What to delete where it is not, if that helps.
    """
    with explained(f"read {path}"):
        text = path.read_bytes()
    hint = f" Delete {remedy} and run again." if remedy else ""
    try:
        data = parse_object(text, "it")
    except StoreError as error:
        raise StoreError(f"{path} is not {what}: {error}{hint}") from None
    if "format" in data and data["format"] != version:
        raise StoreError(f"{path} has format {data['format']!r:.40}, not {version}: use the forkmerge that wrote it.")
    if lacking := sorted({"format", *keys} - set(data)):
        raise StoreError(f"{path} is not {what}: it lacks {', '.join(map(repr, lacking))}.{hint}")
    return data
