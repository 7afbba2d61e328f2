"""Large CSV files as memory-mapped columns: converted once, in bounded memory, and read by rows afterwards."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from forkmerge.datasets._files import Array
from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.convert_once import convert_once, key_of
from forkmerge.engine.storage.json_codec import seal
from forkmerge.engine.storage.user_folders import cache_folder
from forkmerge.errors import ProblemError

_FORMAT = 1  # part of every key: another way of storing columns must not find the old ones
_CHUNK = 1 << 14  # rows converted at a time: about 20 MB while they are numbers and text


@dataclass(frozen=True)
class Schema:
    """The columns of a CSV file, in this order.

    Args:
        first: Columns that are not kept.
        categorical: Codes from 0, kept as 16-bit integers.
        numerical: Kept as 32-bit floats.
        labels: 0 or 1, kept as bytes.
    """

    first: tuple[str, ...]
    categorical: tuple[str, ...]
    numerical: tuple[str, ...]
    labels: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All columns."""
        return (*self.first, *self.categorical, *self.numerical, *self.labels)

    @property
    def groups(self) -> dict[str, tuple[slice, str]]:
        """Where each kept group of columns stands, and its dtype in the file."""
        start, groups = len(self.first), {}
        for name, kind in (("categorical", "<u2"), ("numerical", "<f4"), ("labels", "|u1")):
            count = len(getattr(self, name))
            groups[name] = (slice(start, start + count), kind)
            start += count
        return groups


class MappedTable(Dataset[Any]):
    """Rows of a converted file: batches are [codes, numbers, labels].

    Args:
        folder: Where `convert` put it.
        schema: Its columns.

    Attributes:
        largest: The largest code of every categorical column.
        positives: How many ones every label has.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        self.folder, self.schema = folder, schema
        facts = atomic_files.unseal(folder / "facts.json")
        self._rows = int(facts["rows"])
        self.largest, self.positives = [int(n) for n in facts["largest"]], [int(n) for n in facts["positives"]]
        for name, (columns, kind) in schema.groups.items():
            expected = self._rows * (columns.stop - columns.start) * np.dtype(kind).itemsize
            if (folder / f"{name}.bin").stat().st_size != expected:
                raise atomic_files.Damage(f"{name}.bin does not have {expected} bytes")
        self._maps: list[Array] | None = None

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> list[Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return [column[0] for column in self.read_batch(torch.tensor([index % len(self)]))]

    def read_batch(self, indices: Tensor) -> list[Tensor]:
        """Return codes [n, categorical], numbers [n, numerical] and labels [n, labels] of the given rows."""
        rows = indices.numpy()
        codes, numbers, labels = (column[rows] for column in self._opened())
        return [torch.from_numpy(codes.astype(np.int64)), torch.from_numpy(numbers), torch.from_numpy(labels).float()]

    def _opened(self) -> list[Array]:
        if self._maps is None:
            self._maps = [
                np.memmap(self.folder / f"{name}.bin", kind, "r", shape=(self._rows, columns.stop - columns.start))
                for name, (columns, kind) in self.schema.groups.items()
            ]
        return self._maps

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}  # opened again where it is used, never copied


def open_table(
    paths: Sequence[Path], schema: Schema, cache: Path | None = None, *, progress: bool = True
) -> MappedTable:
    """Return the rows of CSV files, one file after the other, converting them first where that is not done yet.

    The columns lie in the cache folder under a name made from the files, their sizes and dates. They are written under
    another name and renamed when complete, so an interrupted conversion is done again and never read.

    Args:
        paths: The files, each with a line of column names.
        schema: The columns they must have.
        cache: The folder; by default `forkmerge/tables` in the user's cache folder.
        progress: Whether a bar is shown on a terminal while converting.
    """
    folder = (cache or cache_folder("tables")) / key_of(f"table {_FORMAT}\n{schema}", paths)
    return convert_once(folder, partial(_opened, schema=schema), partial(_write, paths, schema, progress=progress))


def _opened(folder: Path, schema: Schema) -> MappedTable | None:
    try:
        return MappedTable(folder, schema)
    except (atomic_files.Damage, OSError, KeyError, TypeError, ValueError):
        return None


def _write(paths: Sequence[Path], schema: Schema, folder: Path, progress: bool) -> None:
    folder.mkdir()
    rows, largest = 0, np.zeros(len(schema.categorical), np.int64)
    positives = np.zeros(len(schema.labels), np.int64)
    with ExitStack() as stack:
        files = {
            name: cast(BinaryIO, stack.enter_context((folder / f"{name}.bin").open("wb"))) for name in schema.groups
        }
        for chunk in _chunks(paths, schema, progress):
            for name, (columns, kind) in schema.groups.items():
                atomic_files.write(files[name], np.ascontiguousarray(chunk[:, columns], kind).tobytes())
            codes, labels = (chunk[:, schema.groups[name][0]] for name in ("categorical", "labels"))
            largest = np.maximum(largest, codes.max(0, initial=0).astype(np.int64))
            positives += labels.sum(0).astype(np.int64)
            rows += len(chunk)
        for file in files.values():
            atomic_files.sync(file)
    if rows == 0:
        raise ProblemError(f"{', '.join(map(str, paths))}: there is no row after the column names.")
    facts = {"rows": rows, "largest": largest.tolist(), "positives": positives.tolist()}
    atomic_files.write_file(folder / "facts.json", seal(facts))


def _chunks(paths: Sequence[Path], schema: Schema, progress: bool) -> Iterator[Array]:
    """Give the checked rows of all files, some thousands at a time."""
    from rich.console import Console
    from rich.progress import Progress

    console, is_silent = Console(stderr=True), not (progress and sys.stderr.isatty())
    with Progress(console=console, transient=True, disable=is_silent) as bar:
        task = bar.add_task("converting tables", total=sum(path.stat().st_size for path in paths))
        for path in paths:
            try:
                with path.open(encoding="ascii", errors="replace") as file:
                    _check_names(path, schema, file.readline())
                    line = 2
                    while lines := list(islice(file, _CHUNK)):
                        yield _parsed(path, schema, lines, line)
                        line += len(lines)
                        bar.advance(task, sum(map(len, lines)))
            except OSError as error:  # of reading alone: what is written stands outside of this generator
                raise ProblemError(f"cannot read {path}: {error.strerror or error}.") from None


def _check_names(path: Path, schema: Schema, header: str) -> None:
    columns = header.strip().split(",")
    for position, name in enumerate(schema.names):
        if position >= len(columns) or columns[position] != name:
            got = repr(columns[position]) if position < len(columns) and columns[position] else "nothing"
            raise ProblemError(f"{path}: column {position + 1} must be {name!r}, found {got} in the first line.")
    if len(columns) > len(schema.names):
        raise ProblemError(f"{path}: there are {len(columns)} columns, expected {len(schema.names)}.")


def _parsed(path: Path, schema: Schema, lines: list[str], start: int) -> Array:
    def refuse(row: int, what: str) -> ProblemError:
        return ProblemError(f"{path}, line {start + row}: {what}. Get the file again.")

    for row, text in enumerate(lines):  # the parser below would skip empty lines, and count columns from the first row
        if text.count(",") + 1 != len(schema.names):
            raise refuse(
                row, f"expected {len(schema.names)} values, found {text.count(',') + 1 if text.strip() else 0}"
            )
    try:
        values = np.loadtxt(lines, dtype=np.float32, delimiter=",", comments=None, ndmin=2)
    except ValueError as error:
        match = re.search(r"could not convert string (.*) to float32 at row (\d+), column (\d+)", str(error))
        if match is None:
            raise refuse(0, str(error)) from None
        raise refuse(int(match[2]), f"{schema.names[int(match[3]) - 1]} is {match[1]}, no number") from None
    limits = {"categorical": 2**16 - 1, "numerical": None, "labels": 1}
    for name, (columns, _) in schema.groups.items():
        part, limit = values[:, columns], limits[name]
        bad = ~np.isfinite(part) if limit is None else ~((part >= 0) & (part <= limit) & (part == np.floor(part)))
        if bad.any():
            row, column = (int(i) for i in np.argwhere(bad)[0])
            expected = "a finite number" if limit is None else f"an integer from 0 to {limit}"
            raise refuse(row, f"{schema.names[columns.start + column]} is {part[row, column]:g}, not {expected}")
    return values
