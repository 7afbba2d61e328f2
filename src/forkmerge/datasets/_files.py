"""Files of data sets: where they are looked for, and one clear message when they are not what is expected."""

from __future__ import annotations

import lzma
import math
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from forkmerge.errors import ProblemError

Root = str | os.PathLike[str] | None
Array = npt.NDArray[Any]
VARIABLE = "FORKMERGE_DATA"
READING_ERRORS = (
    *(OSError, ValueError, EOFError, AttributeError, TypeError, RuntimeError, KeyError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, TokenError),
)
"""What numpy raises for a damaged .npy or .npz file: RuntimeError where a flag says that it is encrypted or packed in
an unknown way, MemoryError where its header asks for too much, TokenError where that is no Python."""
MOST_INFLATED = 1032  # bytes that a byte of a deflate stream can become: no header may promise more


def data_folder(root: Root, what: str) -> Path:
    """Return the folder that was given, or the one that FORKMERGE_DATA names."""
    path = os.fspath(root) if root is not None else os.environ.get(VARIABLE, "")
    if not path:
        raise ProblemError(f"{what}: pass root=…, or set {VARIABLE} to the folder that holds it.")
    folder = Path(path)
    if not folder.is_dir():
        raise ProblemError(f"{what}: there is no folder {path!r}. Pass root=…, or set {VARIABLE}.")
    return folder


def find(folder: Path, subfolders: Sequence[str], files: Iterable[str]) -> Path | None:
    """Return the first of `subfolders` that holds one of `files`; None where none does."""
    names = list(files)
    for subfolder in subfolders:
        if any((folder / subfolder / name).exists() for name in names):
            return folder / subfolder
    return None


def missing(what: str, folder: Path, files: Sequence[str], source: str) -> ProblemError:
    """Return the error for files that are not there.

    Args:
        what: The data set.
        folder: Where they were looked for.
        files: The files, or those that are missing.
        source: Where people get them.
    """
    named = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return ProblemError(
        f"{what} is not complete in {folder}: {named} not found. Get it from {source}, and pass root=… or set "
        f"{VARIABLE}."
    )


def require(what: str, folder: Path, files: Sequence[str], source: str) -> list[Path]:
    """Return the paths of files in a folder; an error names those that are missing."""
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise missing(what, folder, absent, source)
    return [folder / name for name in files]


def weights_file(root: Root, name: str | None) -> str | None:
    """Return the path of a file of published weights, as given or in the data folder; None where none is asked for."""
    if name is None or Path(name).is_file():
        return name
    folder = os.fspath(root) if root is not None else os.environ.get(VARIABLE, "")
    path = Path(folder, name)
    if not path.is_file():
        raise ProblemError(
            f"published weights: there is no file {name!r}, here or in {folder or 'the data folder'}. Download it "
            "first (docs/paper.md says from where), or pass weights=…."
        )
    return str(path)


def check_paper_count(what: str, count: int, expected: float, tolerance: float = 0.0) -> None:
    """Refuse a count that is not that of the paper's table.

    Args:
        what: What was counted, and where.
        count: How many there are.
        expected: The table's number.
        tolerance: How far the table's number may be off, where it is rounded.
    """
    if abs(count - expected) > tolerance:
        about = "about " if tolerance else ""
        raise ProblemError(
            f"{what}: expected {about}{expected:,.0f} as in the paper, found {count:,}. Look for a part that is "
            "missing, or pass check_counts=False to use what is there."
        )


def check_codes(path: Path, name: str, codes: Array, sizes: int | Array, unknown: int | None = None) -> None:
    """Refuse classes or other codes that are not whole numbers from 0 to size − 1.

    Args:
        path: The file.
        name: What they are called in it.
        codes: The codes.
        sizes: How many there can be; for a table, one number per column.
        unknown: The code of what is not known, if there is one.
    """
    if codes.dtype.kind not in "biuf" or (np.ndim(sizes) and codes.shape[1:] != np.shape(sizes)):
        raise ProblemError(
            f"{path}: {name} is an array of {codes.dtype} and shape {codes.shape}: expected codes"
            + (f" in {np.size(sizes)} columns." if np.ndim(sizes) else ".")
        )
    is_good = (codes >= 0) & (codes < sizes)
    if codes.dtype.kind == "f":
        is_good &= codes == np.floor(codes)
    if unknown is not None:
        is_good |= codes == unknown
    if not is_good.all():
        index = tuple(np.argwhere(~is_good)[0])
        last = int(np.broadcast_to(sizes, codes.shape)[index]) - 1
        also = "" if unknown is None else f", or {unknown} where unknown"
        raise ProblemError(f"{path}: {name} holds {codes[index]:g}, expected 0 to {last}{also}. Get the file again.")


class Pack:
    """A .npz file of arrays without objects.

    Args:
        path: The file.
        source: Where people get it.
    """

    def __init__(self, path: Path, source: str) -> None:
        if not path.is_file():
            raise missing(path.stem, path.parent, [path.name], source)
        self.path = path
        self._names = set(self._read(lambda arrays: arrays.files))

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise ProblemError(f"{self.path} has no array {name!r}, only {', '.join(sorted(self._names))}.")
        array: Array = self._read(lambda arrays: self._checked(arrays, name))
        return array

    def codes(self, name: str, sizes: int | Array, unknown: int | None = None) -> Array:
        """Return an array of classes or other codes as integers; see `check_codes`."""
        array = self[name]
        check_codes(self.path, name, array, sizes, unknown)
        return array.astype(np.int64)

    def _checked(self, arrays: Any, name: str) -> Array:
        """Return an array whose header, directory entry and file agree on its size, before anything is inflated."""
        archive: zipfile.ZipFile = arrays.zip
        entry = archive.getinfo(name if name in archive.namelist() else f"{name}.npy")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"array {name!r} is compressed in a way that numpy does not write")
        room = min(entry.compress_size, self.path.stat().st_size) * (MOST_INFLATED if entry.compress_type else 1)
        with archive.open(entry) as file:
            version = np.lib.format.read_magic(file)
            read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            if version not in read_header:
                raise ValueError(f"array {name!r} has version {version} of the format, which holds no numbers")
            shape, _, dtype = read_header[version](file)
            promised, start = math.prod(shape) * dtype.itemsize, file.tell()
        if not dtype.itemsize or promised + start != entry.file_size or promised > room:
            raise ValueError(
                f"array {name!r} promises {promised} bytes, and its entry of {entry.compress_size} bytes cannot "
                f"hold them"
            )
        if promised > (memory := _memory()):
            raise ValueError(f"array {name!r} takes {promised} bytes, and this machine has {memory}")
        array: Array = arrays[name]
        return array

    def _read(self, get: Callable[[Any], Any]) -> Any:
        try:
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return get(arrays)
        except READING_ERRORS as error:
            raise ProblemError(f"cannot read {self.path}: {error}. Get the file again.") from None


def _memory() -> int:
    """Return the bytes of memory that this machine has; without a bound where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return sys.maxsize


def check_columns(pack: Pack, columns: Mapping[str, Sized]) -> None:
    """Refuse arrays of a pack that do not have the same number of rows."""
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        named = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ProblemError(f"{pack.path} has arrays of different lengths: {named}. Get the file again.")
