"""One process per folder: the lock that a run, a comparison or a diagnosis holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from forkmerge.engine.storage.atomic_files import check_entries, explained, holds_nothing, remove_unfinished
from forkmerge.errors import StoreError

try:
    import fcntl
except ImportError:  # no such locks on Windows: two processes in one folder go unnoticed there
    fcntl = None  # type: ignore[assignment]


def try_lock(file: BinaryIO, operation: str) -> bool:
    """Try `LOCK_EX`, `LOCK_SH` or `LOCK_UN` on an open file; whether nobody else is in the way."""
    try:
        if fcntl is not None:
            fcntl.flock(file, getattr(fcntl, operation) | fcntl.LOCK_NB)
    except OSError as error:  # any other error means a file system without locks: as on Windows
        return not isinstance(error, BlockingIOError)
    return True


def take_lock(run: Path) -> BinaryIO:
    """Return the open lock of a folder; closing it, or the end of the process, gives it back."""
    file = (run / "lock").open("ab")
    for _ in range(5):  # `status` holds it for an instant
        if try_lock(file, "LOCK_EX"):
            return file
        time.sleep(0.01)
    file.close()
    raise StoreError(f"{run} is already running in another process: wait for it or stop it.")


@contextmanager
def locked_folder(folder: Path, marker: str) -> Iterator[None]:
    """Hold the lock of a new folder, or of one that holds the file `marker`; one of something else is refused."""
    with explained(f"make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        check_entries(folder)
        if not (folder / marker).exists() and not holds_nothing(folder, marker):
            raise StoreError(f"{folder} holds something else: choose another folder with --out.")
    with take_lock(folder):
        remove_unfinished(folder)
        yield
