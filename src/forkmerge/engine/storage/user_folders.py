"""Folders that belong to the user: caches, and the secret by which a run shows who started it."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import shlex
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forkmerge.engine.storage.json_codec import encode, pack
from forkmerge.errors import StoreError

try:
    import grp
    import pwd
except ImportError:  # Windows has neither such owners nor such modes
    grp = pwd = None  # type: ignore[assignment]

_ELSEWHERE = "choose another folder, with cache=… or XDG_CACHE_HOME"
_SECRET, _BYTES = "secret", 32


def cache_folder(name: str) -> Path:
    """Return where things of a kind are kept that can be made again: in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forkmerge" / name


def make_private(folder: Path) -> None:
    """Make a folder that is the user's alone, or check that the one there is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Refuse a folder into which another user could have put something; one that is not there is fine."""
    if pwd is None or not folder.exists():
        return
    facts = folder.stat()
    if facts.st_uid not in (os.geteuid(), 0):
        raise StoreError(f"{folder} belongs to another user, who may have put anything there: {_ELSEWHERE}.")
    if facts.st_mode & stat.S_IWOTH or (facts.st_mode & stat.S_IWGRP and not _is_own_group(facts.st_gid)):
        raise StoreError(
            f"{folder} can be written by other users, who may have put anything there: empty it and type chmod go-w "
            f"{shlex.quote(str(folder))}, or {_ELSEWHERE}."
        )


def _is_own_group(number: int) -> bool:
    """Whether a group is the one that many systems make for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def sign(value: Any) -> str | None:
    """Return a mark that only this user can make of some plain data; None where no secret can be kept."""
    keys = (_read_secret(folder, make=True) for folder in _secret_folders())
    return next((_mark(value, key) for key in keys if key is not None), None)


def is_signed(value: Any, mark: str | None) -> bool:
    """Whether this user has signed the data."""
    keys = (_read_secret(folder, make=False) for folder in _secret_folders())
    return any(hmac.compare_digest(_mark(value, key), str(mark)) for key in keys if key is not None)


def _mark(value: Any, key: bytes) -> str:
    return hmac.new(key, encode(pack(value)[0]), hashlib.sha256).hexdigest()


def _secret_folders() -> Iterator[Path]:
    """Yield where the secret may be: the later ones are for a home that cannot be written."""
    if state := os.environ.get("XDG_STATE_HOME"):
        yield Path(state) / "forkmerge"
    elif (home := os.path.expanduser("~")) != "~":
        yield Path(home) / ".local" / "state" / "forkmerge"
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "forkmerge"
    yield Path(tempfile.gettempdir()) / f"forkmerge-{os.geteuid() if pwd else os.environ.get('USERNAME', '')}"


def _read_secret(folder: Path, make: bool) -> bytes | None:
    path = folder / _SECRET
    try:
        if make:
            make_private(folder)
            if not path.exists():
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(secrets.token_bytes(_BYTES))
        check_private(folder)
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or (pwd and (facts.st_uid != os.geteuid() or facts.st_mode & 0o077)):
            return None
        secret = path.read_bytes()
    except (OSError, StoreError):
        return None
    return secret if len(secret) == _BYTES else None
