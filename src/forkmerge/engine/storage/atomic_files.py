"""Files that survive a kill: written under another name, synced, renamed, verified when read; no link is followed."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forkmerge.engine.storage.json_codec import JSON, seal
from forkmerge.errors import StoreError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""How the safetensors format calls them."""

_MAPPED = 1 << 24  # bytes of a file read before it is closed and opened again
TEMPORARY = ".tmp-"  # how the name of anything unfinished begins


class Damage(Exception):
    """A file is not what was once written; the message names it and says why."""


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn what the operating system refuses into a StoreError that says what was tried."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot {doing}: {_reason(error)}.") from error


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what will not fit on the disk of a folder, which need not exist yet."""
    existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise StoreError(
            f"{folder} will need about {_megabytes(needed)}, and {_megabytes(free)} are free there: free some space, "
            "or choose a folder on another disk."
        )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def is_full(error: BaseException) -> bool:
    """Whether a StoreError says that the disk, or the user's share of it, is full."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, list[str]]:
    """Return how a safetensors file of these types and shapes begins, and the order in which the tensors follow."""
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


# Every change of the disk passes through the next four functions, which is where tests put their faults.


def write(file: BinaryIO, data: bytes) -> None:
    """Hand `data` to the operating system; `sync` makes it outlive a power cut."""
    file.write(data)
    file.flush()


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write the safetensors format tensor by tensor: only strided or remote ones are copied, one at a time."""
    header, order = safetensors_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    with path.open("xb") as file:
        file.write(header)
        for name in order:
            plain = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
            file.write(plain.reshape(-1).view(torch.uint8).numpy().data)


def _fsync(descriptor: int) -> None:
    os.fsync(descriptor)


def _rename(source: Path, target: Path) -> None:
    os.replace(source, target)


def sync(file: BinaryIO) -> None:
    """Wait until all of `file` is on the disk."""
    _fsync(file.fileno())


def write_file(path: Path, data: bytes) -> None:
    """Write and sync a new file; one that exists, or a link, is an error."""
    with path.open("xb") as file:
        write(file, data)
        sync(file)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write and sync a new safetensors file."""
    try:
        _save_tensors(path, dict(tensors))
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
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


def _unfinished(path: Path) -> Path:
    """Return a name beside `path` that nobody who had the folder before can have guessed, to put a link there."""
    return path.with_name(f"{TEMPORARY}{path.stem[-50:]}-{secrets.token_hex(8)}{path.suffix[-10:]}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name for what takes the place of the file `path` when it is complete; an error leaves nothing of it."""
    unfinished = _unfinished(path)
    try:
        yield unfinished
        move(unfinished, path)
    except (Exception, KeyboardInterrupt):  # a full disk must not stay full
        remove(unfinished)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file `path` by `data`: after a kill it holds either the old bytes or the new ones."""
    with explained(f"write {path}"), replacing(path) as unfinished:
        write_file(unfinished, data)


def remove(path: Path) -> None:
    """Remove a file, a folder or a link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what a kill has left in a folder and in those one level below."""
    for item in (*folder.glob(f"{TEMPORARY}*"), *folder.glob(f"*/{TEMPORARY}*")):
        remove(item)


def safe_name(text: str) -> str:
    """Return a name for a file or folder; where characters had to go, a checksum keeps it unique."""
    name = re.sub(r"[^A-Za-z0-9._+,=-]", "-", text.replace(":", "-")).lstrip(".-")
    if name == text.replace(":", "-"):
        return name
    return f"{name[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def check_entries(folder: Path) -> None:
    """Refuse a folder that holds anything but files and folders, however deep: it may come from anywhere.

    A link may lead out of the folder, and who opens a pipe waits for ever.
    """
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except (FileNotFoundError, NotADirectoryError):  # a running run renames its folders
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif not entry.is_file(follow_symlinks=False):
                raise StoreError(
                    f"{entry.path} is a {_kind(entry)}: the folder of a run, a comparison or a diagnosis holds files "
                    "and folders only. Remove it."
                )


def _kind(entry: os.DirEntry[str]) -> str:
    mode = entry.stat(follow_symlinks=False).st_mode
    kinds = {stat.S_IFLNK: "link", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def check_there(folder: Path, file: BinaryIO) -> None:
    """Refuse to go on where the folder of an open file is gone: the file itself would still take everything."""
    try:
        if os.path.samestat(os.stat(folder / Path(file.name).name), os.fstat(file.fileno())):
            return
    except OSError:
        pass
    raise StoreError(
        f"{folder} has been removed, moved or replaced while the run wrote to it: the run ends here. If it was moved, "
        "move it back and resume it; if it was removed, its checkpoints and its record are lost: start again."
    )


def is_unused(folder: Path) -> bool:
    """Tell whether there is nothing to protect: no folder, or what a kill while one was made leaves in it."""
    return not folder.exists() or (folder.is_dir() and holds_nothing(folder, "config.json"))


def holds_nothing(folder: Path, first: str) -> bool:
    """Tell whether a folder holds at most what a kill leaves while `first`, the first of its files, is written."""
    unfinished = TEMPORARY + Path(first).stem
    return all(name == "lock" or name.startswith(unfinished) for name in os.listdir(folder))


def numbered(folder: Path) -> list[Path]:
    """Return what lies in `folder` under a number for its name, in the order of the numbers."""
    return sorted((item for item in folder.glob("*") if item.name.isdecimal()), key=lambda item: int(item.name))


def discard(folder: Path) -> None:
    """Remove `folder`, if there is one, never leaving half of it under its name."""
    if folder.exists():
        rubbish = _unfinished(folder)
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
            actual = fingerprint(folder / name)
        except OSError as error:
            raise Damage(f"{name}: {_reason(error)}") from error
        if actual["bytes"] != expected["bytes"]:
            raise Damage(f"{name}: it holds {actual['bytes']} bytes, {expected['bytes']} expected")
        if actual != expected:
            raise Damage(f"{name}: its sha256 has changed")


def unseal(path: Path) -> dict[str, Any]:
    """Read a file whose bytes `seal` made; raise Damage if a single bit differs."""
    try:
        text = path.read_bytes()
        content = json.loads(text)["content"]
        if seal(content) != text:
            raise ValueError("it does not match its own checksum")
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damage(f"{path.name}: {_reason(error)}") from error
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into main memory; nothing refers to the file afterwards.

    The file is mapped, and what was read of it counts as memory until it is closed: so it is opened anew now and then.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        while names:
            with safe_open(path, framework="pt") as file:
                room = _MAPPED
                while names and room > 0:
                    name = names.pop()
                    tensors[name] = file.get_tensor(name).clone()
                    room -= tensors[name].nbytes
        return tensors
    except (OSError, SafetensorError) as error:
        raise Damage(f"{path.name}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
