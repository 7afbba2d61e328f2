"""Weights of finished models as safetensors on disk, whole or in shards with an index: read and written in pieces."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forkmerge.engine.storage.atomic_files import DTYPES, explained, safetensors_header, sync, write, write_file
from forkmerge.engine.storage.json_codec import encode
from forkmerge.engine.storage.json_files import parse
from forkmerge.errors import StoreError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What the files in a folder are called, as transformers writes them."""

PIECE = 2**20
"""Elements of a tensor that are in memory at a time."""

_KINDS = {word: dtype for dtype, word in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies on disk.

    Args:
        file: The file.
        dtype: Its type.
        shape: Its shape.
        offset: Where its first byte is.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def pieces(self) -> Iterator[tuple[int, int]]:
        """First and last (exclusive) elements of the pieces that it is read in."""
        count = math.prod(self.shape)
        return ((start, min(start + PIECE, count)) for start in range(0, count, PIECE))

    def empty(self) -> Tensor:
        """Return a tensor of the same type and shape, to be filled."""
        return torch.empty(self.shape, dtype=self.dtype)

    def read(self, start: int, stop: int) -> Tensor:
        """Return some of its elements, in the order of the disk."""
        size = self.dtype.itemsize
        data = bytearray((stop - start) * size)
        with explained(f"read {self.file}"), self.file.open("rb") as file:
            file.seek(self.offset + start * size)
            if file.readinto(data) != len(data):
                raise StoreError(f"{self.file} has become shorter while it was read.")
        return torch.frombuffer(data, dtype=torch.uint8).view(self.dtype)


class WeightFiles:
    """The tensors of a model on disk. A file that is damaged is refused, and so is one outside of the folder.

    Args:
        path: A safetensors file; or a folder with `model.safetensors`, or with shards and their index.

    Attributes:
        path: The same.
        tensors: Where each one is, by name.
        shards: By the name of every file, the names of its tensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._index: dict[str, str] = {}  # in which file each tensor is said to be
        if self.path.is_dir():
            files = self._files_of_folder()
        elif self.path.is_file():
            files = {self.path.name: self.path}
        else:
            raise StoreError(f"{self.path} is no safetensors file, and no folder with {WHOLE} or {INDEX}.")
        self.tensors: dict[str, StoredTensor] = {}
        self.shards: dict[str, list[str]] = {}
        for file in files.values():
            entries = _read_header(file)
            twice = self.tensors.keys() & entries.keys()
            if twice:
                raise StoreError(f"{self.path}: the tensor {min(twice)!r} is in two shards.")
            self.tensors.update(entries)
            self.shards[file.name] = list(entries)
        for name, shard in self._index.items():
            if name not in self.shards[shard]:
                raise StoreError(f"{self.path}: the tensor {name!r} is not in {shard}, where {INDEX} says it is.")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors.values())

    def _files_of_folder(self) -> dict[str, Path]:
        if not (self.path / INDEX).exists():
            return {WHOLE: self._inside(WHOLE)}
        index = parse(self._inside(INDEX).read_bytes(), str(self.path / INDEX))
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not shards:
            raise StoreError(f"{self.path / INDEX} has no weight_map, which says in which file each tensor is.")
        self._index = {str(name): str(file) for name, file in shards.items()}
        return {file: self._inside(file) for file in dict.fromkeys(self._index.values())}

    def _inside(self, name: str) -> Path:
        """Return a file of the folder; the name may come from anywhere, and the file may be a link."""
        path = self.path / name
        if Path(name).name != name or "\\" in name:
            raise StoreError(f"{self.path / INDEX} names {name!r}, which is no file of that folder.")
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise StoreError(
                f"{path} is a link that leads out of its folder: copy the folder with what its links lead to, "
                "`cp -rL FOLDER COPY`, and give the copy."
            )
        if not path.is_file():
            raise StoreError(f"{self.path} has no file {name}.")
        return path


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, which safetensors has checked: they are all there, and lie side by side."""
    try:
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (OSError, SafetensorError, ValueError) as error:
        raise StoreError(f"{path} is no whole safetensors file: {error}.") from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _KINDS:
            raise StoreError(f"{path}: the tensor {name!r} is {entry['dtype']}, which cannot be merged.")
        shape, start = tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
        tensors[name] = StoredTensor(path, _KINDS[entry["dtype"]], shape, start)
    return tensors


def write_shard(path: Path, tensors: Mapping[str, StoredTensor], values: Callable[[str], Iterator[Tensor]]) -> None:
    """Write and sync a new safetensors file whose tensors arrive in pieces.

    Args:
        path: The file.
        tensors: Whose types and shapes they have.
        values: The pieces of a tensor, by its name.
    """
    header, order = safetensors_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    with path.open("xb") as file:
        write(file, header)
        for name in order:
            for piece in values(name):
                write(file, piece.view(torch.uint8).numpy().tobytes())
        sync(file)


def write_index(path: Path, shards: Mapping[str, list[str]], nbytes: int) -> None:
    """Write the index of a folder of shards."""
    places = {tensor: file for file, names in shards.items() for tensor in names}
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(places.items()))}
    write_file(path, encode(index, 2))
