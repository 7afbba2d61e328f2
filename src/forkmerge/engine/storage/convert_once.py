"""What takes long to make from files: made once, kept under a name made from them, read by any process afterwards."""

from __future__ import annotations

import hashlib
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.user_folders import check_private, make_private
from forkmerge.errors import ProblemError, StoreError

_LEFTOVER = 24 * 3600  # seconds after which something unfinished can only be what a kill has left

T = TypeVar("T")


def key_of(form: str, paths: Iterable[Path], kind: str = "file") -> str:
    """Return a checksum of files, by their paths, sizes and dates, and of what is made from them.

    Args:
        form: What is made, and how: another form must not find what was made in this one.
        paths: The files.
        kind: What they are, for the error where one is missing.
    """
    digest = hashlib.sha256(f"{form}\n".encode())
    for path in paths:
        try:
            facts = path.stat()
        except OSError as error:
            raise ProblemError(f"cannot read the {kind} {path}: {error.strerror}.") from None
        text = f"{path.absolute()}\x1f{facts.st_size}\x1f{facts.st_mtime_ns}\n"
        digest.update(text.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def convert_once(path: Path, read: Callable[[Path], T | None], write: Callable[[Path], None]) -> T:
    """Return what a file or folder holds, after making it where there is none or a damaged one.

    The folder it lies in must be the user's own. It is made under another name and renamed when it is complete and on
    the disk: an interrupted conversion is done again and never read.

    Args:
        path: The file or folder.
        read: Gives its content; None where there is none or not a whole one.
        write: Makes it, under the path that it gets, and syncs its files.
    """
    check_private(path.parent)
    check_private(path)
    content = read(path)
    if content is None:
        with atomic_files.explained(f"write {path}"):
            _make(path, write)
        content = read(path)
    if content is None:
        raise StoreError(f"{path} cannot be read: remove it and try again.")
    return content


def _make(path: Path, write: Callable[[Path], None]) -> None:
    make_private(path.parent)
    for old in path.parent.glob(f"{atomic_files.TEMPORARY}{path.stem}-*"):
        touched = max(item.stat().st_mtime for item in (old, *old.glob("*")))
        if time.time() - touched > _LEFTOVER:
            atomic_files.remove(old)
    with atomic_files.replacing(path) as unfinished:
        write(unfinished)
        for item in (unfinished, *unfinished.glob("*")):
            item.chmod(item.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))  # whatever the umask
        if path.is_dir():  # a folder cannot be replaced by a rename
            atomic_files.discard(path)
