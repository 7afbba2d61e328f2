"""One folder per run: resolved config, record, checkpoints, result. Nothing in it is ever unpickled.

    RUN/config.json                     resolved config, written once
    RUN/record.jsonl, rounds.jsonl      one JSON object per line, append only: events, and finished rounds to go on from
    RUN/checkpoints/00000012/           state.safetensors, state.json, manifest.json
    RUN/branches/00000003/              the same three files, only when branches are kept
    RUN/model.safetensors, result.json  written at the end, result.json last
    RUN/lock                            locked while a process runs the run

All but these two is written under a name `.tmp-…`, synced, then renamed; `load` removes what a kill leaves.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, Literal

from torch import Tensor

from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.atomic_files import Damage, explained, write_atomically
from forkmerge.engine.storage.json_codec import JSON, encode, pack, plain, seal, unpack
from forkmerge.engine.storage.json_files import (
    checksum,
    interpreting,
    is_torn,
    parse,
    parse_object,
    read_object,
    with_checksum,
    write_object,
)
from forkmerge.engine.storage.lock import take_lock, try_lock
from forkmerge.engine.storage.no_store import NoStore
from forkmerge.engine.storage.rounds_file import RoundsFile, check_owner
from forkmerge.errors import StoreError, command, is_count

__all__ = ["NoStore", "RunFolder", "Store", "list_runs", "status", "write_atomically"]

FORMAT = 1
CHECKPOINTS_KEPT = 2  # the newest, and the one to fall back on when the newest is damaged
_RUN = "run_id"  # made at the start of a run: in its config and in all of its checkpoints
_TENSORS, _STATE, _MANIFEST = "state.safetensors", "state.json", "manifest.json"


class RunFolder:
    """The folder of one run, made by `RunFolder.create` or `RunFolder.open`.

    Only the holder of the lock may write: opened with `lock=False`, `load` neither cleans up nor cuts the
    record, so that looking at a running run is harmless.

    Attributes:
        config: The resolved config, exactly as it was given to `create`.
        warnings: One line for each damaged checkpoint that `load` passed over.
        rounds: The finished rounds; a checkpoint need not hold them.
    """

    def __init__(self, path: Path, data: Mapping[str, Any], lock: BinaryIO | None) -> None:
        self.path = path
        self.config: dict[str, Any] = unpack({key: data[key] for key in data if key != _RUN}, {})
        # What its checkpoints have to say: nothing where an earlier version began the run.
        self._run = {_RUN: data[_RUN], "config": checksum(data)} if _RUN in data else {}
        self.warnings = list[str]()
        self.rounds = RoundsFile(path / "rounds.jsonl", data.get(_RUN), self._writable)
        self._lock = lock
        self._record = None if lock is None else (path / "record.jsonl").open("ab")

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any]) -> RunFolder:
        """Make and lock the folder of a new run; a path that holds anything is refused."""
        path = Path(path)
        packed, tensors = pack(dict(config))
        if tensors:
            raise StoreError(f"config.{next(iter(tensors))}: a config cannot hold a tensor.")
        assert isinstance(packed, dict)
        data = {**packed, _RUN: secrets.token_hex(8)}
        with explained(f"create the run folder {path}"):
            if not atomic_files.is_unused(path):
                advice = f"choose another folder or continue it with `{command(f'resume {quote(str(path))}')}`"
                raise StoreError(f"{path} exists and is not an empty folder: {advice}.")
            path.mkdir(parents=True, exist_ok=True)
            atomic_files.check_entries(path)
            with ExitStack() as release:
                lock = release.enter_context(take_lock(path))
                write_object(path / "config.json", data)
                atomic_files.sync_folder(path.parent)
                release.pop_all()
            return cls(path, data, lock)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, lock: bool = True) -> RunFolder:
        """Open an existing run: to continue it (`load` comes next) or, with `lock=False`, to look at it."""
        path = Path(path)
        data = read_object(file := _config_of(path))
        try:
            dict(unpack(data, {}))
        except (StoreError, TypeError, ValueError) as error:
            raise StoreError(f"{file} is not the config of a run: {error}") from None
        with explained(f"open the run folder {path}"):
            return cls(path, data, take_lock(path) if lock else None)

    def record(self, event: Mapping[str, Any]) -> None:
        """Append `event` as one line of strict JSON; numbers that are not finite become null (`plain`)."""
        file, data = self._writable(), {key: plain(value, key) for key, value in event.items()}
        with explained(f"append to {self.path / 'record.jsonl'}"):
            if os.fstat(file.fileno()).st_size == 0 and self._run:  # the first line says whose they are
                data = {_RUN: self._run[_RUN], **data}
            line = encode(with_checksum(data, "crc32"))
            atomic_files.write(file, line)

    def save(self, value: Any, index: int) -> None:
        """Write checkpoint `index`: any nested structure that `pack` accepts.

        Values, shapes and dtypes of tensors are kept; strides and devices are not: `load` returns contiguous
        tensors in main memory. A checkpoint of the same index is replaced. Afterwards the two newest
        checkpoints stay and older ones are removed.
        """
        checkpoints = self.path / "checkpoints"
        if index < (newest := max((int(folder.name) for folder in atomic_files.numbered(checkpoints)), default=0)):
            raise StoreError(f"checkpoint {index} is older than the newest, {newest}: call load() first.")
        self._write_state(checkpoints / f"{index:08d}", value)
        self._prune()

    def load(self) -> Any | None:
        """Return the value of the newest undamaged checkpoint, or None, and make the folder match it.

        The record is cut back to where it was at that checkpoint. A damaged checkpoint is named in `warnings`
        and renamed to, say, `00000012.damaged`, in place of an older folder of that name.
        """
        record, value, offset = self.path / "record.jsonl", None, 0
        with explained(f"continue from {self.path}"):
            folders = atomic_files.numbered(self.path / "checkpoints")
            size = record.stat().st_size if record.exists() else 0
            for folder in reversed(folders):
                try:
                    value, offset = self._read_state(folder, size)
                    break
                except Damage as damage:
                    self.warnings.append(f"skipped the damaged checkpoint {folder}: {damage}")
                    if self._record is not None:
                        aside = folder.with_name(f"{folder.name}.damaged")
                        atomic_files.remove(aside)
                        atomic_files.move(folder, aside)
            if self._record is not None:
                atomic_files.remove_unfinished(self.path)
                self._prune()
                self._record.truncate(offset)
                atomic_files.sync(self._record)
        return value

    def keep_branches(self, value: Any, index: int) -> None:
        """Keep `value`, the branches of round `index`, for later questions; it is never pruned."""
        self._write_state(self.path / "branches" / f"{index:08d}", value)

    def load_branches(self, index: int) -> Any:
        """Return what `keep_branches` kept for round `index`, verified."""
        folder = self.path / "branches" / f"{index:08d}"
        if not folder.is_dir():
            kept = ", ".join(str(int(item.name)) for item in atomic_files.numbered(folder.parent)) or "none"
            raise StoreError(f"{self.path} keeps no branches of round {index}. Kept rounds: {kept}.")
        try:
            return self._read_state(folder)[0]
        except Damage as damage:
            raise StoreError(f"the branches in {folder} are damaged: {damage}.") from damage

    def finish(self, result: Mapping[str, Any], model_tensors: Mapping[str, Tensor]) -> None:
        """Write the model and then the result, whose presence means that the run is finished."""
        record, data, model = self._writable(), plain(result), self.path / "model.safetensors"
        with explained(f"write {model}"), atomic_files.replacing(model) as unfinished:
            atomic_files.sync(record)
            (self.path / "result.json").unlink(missing_ok=True)
            atomic_files.write_tensors(unfinished, model_tensors)
            files: dict[str, JSON] = {model.name: atomic_files.fingerprint(unfinished)}
        write_object(self.path / "result.json", {"format": FORMAT, "files": files, "result": data})

    def result(self) -> dict[str, Any] | None:
        """Return what `finish` was given, in `plain` form, or None while the run is not finished."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        data = read_object(path)
        with interpreting(path, "the result of a run"):
            return dict(data["result"])

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the model of a finished run, verified against the checksum in result.json."""
        path, model = self.path / "result.json", self.path / "model.safetensors"
        if not path.exists():
            raise StoreError(
                f"{self.path} is not finished: continue it with `{command(f'resume {quote(str(self.path))}')}`."
            )
        data = read_object(path)
        try:
            with interpreting(path, "the result of a run"):
                atomic_files.verify(self.path, {model.name: data["files"][model.name]})
            return atomic_files.read_tensors(model)
        except Damage as damage:
            raise StoreError(f"the model in {self.path} is damaged: {damage}.") from damage

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the recorded events, without a last line torn by a kill; a record that was cut off is an error."""
        path, expected = self.path / "record.jsonl", self._recorded()
        with explained(f"read {path}"), path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not is_torn(line):
                    data = parse_object(line, f"line {number} of {path}", "crc32")
                    check_owner(path, data, self._run.get(_RUN))
                    yield data
            if (size := os.fstat(file.fileno()).st_size) < expected:
                raise StoreError(f"{path} is cut off: it holds {size} bytes, and held {expected} at a checkpoint.")

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        record, lock, self._record, self._lock = self._record, self._lock, None, None
        if record is not None and lock is not None:
            with lock, explained(f"close {self.path}"), record:
                try_lock(lock, "LOCK_UN")  # closing is not enough while a forked worker holds a copy

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _recorded(self) -> int:
        """Return the bytes that the record held when the newest undamaged checkpoint was written."""
        for folder in reversed(atomic_files.numbered(self.path / "checkpoints")):
            with suppress(Damage):
                if is_count(offset := atomic_files.unseal(folder / _MANIFEST).get("record_offset"), 0):
                    return offset
        return 0

    def _prune(self) -> None:
        for folder in atomic_files.numbered(self.path / "checkpoints")[:-CHECKPOINTS_KEPT]:
            atomic_files.discard(folder)

    def _writable(self) -> BinaryIO:
        if self._record is None:
            raise StoreError(f"{self.path} was closed or opened for reading only: open it with lock=True.")
        atomic_files.check_there(self.path, self._record)
        return self._record

    def _write_state(self, folder: Path, value: Any) -> None:
        """Write the three files of `folder`, the manifest last, and only then give it its name."""
        record, (data, tensors) = self._writable(), pack(value)
        with explained(f"write {folder}"):
            atomic_files.sync(record)
            folder.parent.mkdir(exist_ok=True)
            with atomic_files.replacing(folder) as unfinished:
                unfinished.mkdir()
                atomic_files.write_tensors(unfinished / _TENSORS, tensors)
                atomic_files.write_file(unfinished / _STATE, encode(data))
                names = (_TENSORS, _STATE)
                files: dict[str, JSON] = {name: atomic_files.fingerprint(unfinished / name) for name in names}
                offset = os.fstat(record.fileno()).st_size
                manifest = seal({"format": FORMAT, **self._run, "record_offset": offset, "files": files})
                atomic_files.write_file(unfinished / _MANIFEST, manifest)
                atomic_files.sync_folder(unfinished)
                atomic_files.discard(folder)
            atomic_files.sync_folder(self.path)

    def _read_state(self, folder: Path, record_size: float = math.inf) -> tuple[Any, int]:
        """Return the verified value in `folder` and the size the record had when it was written."""
        manifest = atomic_files.unseal(folder / _MANIFEST)
        if (version := manifest.get("format")) != FORMAT:
            raise StoreError(f"{folder} has format {version}, not {FORMAT}: use the forkmerge that wrote it.")
        if {key: manifest[key] for key in (_RUN, "config") if key in manifest} != self._run:
            which = "with another config.json" if manifest.get(_RUN) == self._run.get(_RUN) else "by another run"
            raise StoreError(f"{folder} was written {which} than this folder's: put each back where it belongs.")
        try:
            files, offset = {name: manifest["files"][name] for name in (_TENSORS, _STATE)}, manifest["record_offset"]
            atomic_files.verify(folder, files)
        except (LookupError, TypeError) as error:
            raise Damage(f"{_MANIFEST}: it does not say what it should ({error})") from error
        if not is_count(offset, 0):
            raise Damage(f"{_MANIFEST}: its record_offset is {str(offset)[:20]!r}")
        if record_size < offset:
            raise Damage(f"record.jsonl: it holds {record_size} bytes, {offset} expected")
        with explained(f"read {folder / _STATE}"):
            data = parse((folder / _STATE).read_bytes(), str(folder / _STATE))
        return unpack(data, atomic_files.read_tensors(folder / _TENSORS)), offset


Store = RunFolder | NoStore


def status(path: str | os.PathLike[str]) -> Literal["finished", "running", "interrupted"]:
    """Say how the run in `path` stands; "running" means that some process holds its lock."""
    lock = _config_of(Path(path)).with_name("lock")
    if lock.with_name("result.json").is_file():
        return "finished"
    if not lock.exists():
        return "interrupted"
    with explained(f"read {lock}"), lock.open("rb") as file:
        return "interrupted" if try_lock(file, "LOCK_SH") else "running"


def list_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """List `folder` itself and the folders one and two levels inside it that hold a run, sorted."""
    runs = (path.parent for depth in ("", "*/", "*/*/") for path in Path(folder).glob(f"{depth}record.jsonl"))
    return sorted(run for run in runs if (run / "config.json").is_file())


def _config_of(run: Path) -> Path:
    with explained(f"read {run}"):
        atomic_files.check_entries(run)
    if not (run / "config.json").is_file():
        if (run / "plan.json").is_file():
            raise StoreError(
                f"{run} is a comparison: `{command(f'compare {quote(str(run))}')}` shows it, and the command that "
                "began it goes on with it."
            )
        raise StoreError(f"{run} is not a run folder: it holds no config.json.")
    return run / "config.json"
