"""States that several runs have in common, each kept once: in memory, or in a folder beside the runs.

    FOLDER/KEY/    state.safetensors, state.json, manifest.json

Several processes may use a folder at a time: what is there is whole, and what is damaged counts as not there.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.atomic_files import Damage, explained
from forkmerge.engine.storage.json_codec import JSON, encode, pack, seal, unpack
from forkmerge.engine.storage.json_files import parse
from forkmerge.errors import StoreError

SHARED = ".shared"
"""The folder's name beside runs that share states."""

_TENSORS, _STATE, _MANIFEST = "state.safetensors", "state.json", "manifest.json"


class SharedStore:
    """Values with tensors, by key.

    Args:
        folder: Where they are kept; None keeps them in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._values: dict[str, Any] = {}

    def get(self, key: str) -> Any | None:
        """Return the value of a key, of which the caller may change everything; None where there is none."""
        if self.folder is None:
            return copy.deepcopy(self._values.get(key))
        folder = self.folder / key
        if not (folder / _MANIFEST).is_file():
            return None
        try:
            files = atomic_files.unseal(folder / _MANIFEST)["files"]
            atomic_files.verify(folder, {name: files[name] for name in (_TENSORS, _STATE)})
            data = parse((folder / _STATE).read_bytes(), str(folder / _STATE))
            return unpack(data, atomic_files.read_tensors(folder / _TENSORS))
        except (Damage, StoreError, OSError, LookupError, TypeError, ValueError):
            return None  # it is made again

    def put(self, key: str, value: Any) -> None:
        """Keep a value, unless there is one of that key."""
        if self.folder is None:
            self._values.setdefault(key, copy.deepcopy(value))
            return
        folder, (data, tensors) = self.folder / key, pack(value)
        if self.get(key) is not None:
            return
        with explained(f"write {folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_files.replacing(folder) as unfinished:
                unfinished.mkdir()
                atomic_files.write_tensors(unfinished / _TENSORS, tensors)
                atomic_files.write_file(unfinished / _STATE, encode(data))
                names = (_TENSORS, _STATE)
                files: dict[str, JSON] = {name: atomic_files.fingerprint(unfinished / name) for name in names}
                atomic_files.write_file(unfinished / _MANIFEST, seal({"files": files}))
                atomic_files.remove(folder)  # a damaged one

    def clear(self) -> None:
        """Forget everything."""
        self._values = {}
        if self.folder is not None:
            atomic_files.remove(self.folder)
