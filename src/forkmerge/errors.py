"""Every error the library raises on purpose, and the checks of names and numbers that raise them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TypeGuard


class ForkMergeError(Exception):
    """Base of all errors raised on purpose; its message says what to do next."""


class ProblemError(ForkMergeError):
    """The problem, the model or an option cannot be trained as given."""


class ConfigError(ForkMergeError):
    """A recipe file or a command-line value is wrong."""


class RunFailed(ForkMergeError):
    """A run learned nothing: there is no model worth returning."""


class StoreError(ForkMergeError):
    """A run folder cannot be created, read or continued."""


def command(words: str) -> str:
    """Return what to type for a `forkmerge` command: by the name it was called by, `./run` for example."""
    return f"{os.environ.get('FORKMERGE_COMMAND', 'forkmerge')} {words}"


def unknown_name(kind: str, name: object, choices: Iterable[object]) -> str:
    """Say that `name` is no `kind`, list what exists and offer the closest match."""
    names = [str(item) for item in choices]
    close = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {str(name)!r}.{hint} Known: {', '.join(names) or 'none'}."


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether a value is an integer of at least `least`; True and False are not integers here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(name: str, value: object, *, error: type[ForkMergeError] = ProblemError) -> int:
    """Return a positive integer, or say by what name it is none."""
    if not is_count(value):
        raise error(f"{name} must be a positive integer, got {value!r}.")
    return value


def check_packages(user: str, extra: str, modules: Mapping[str, str]) -> None:
    """Raise one error that names every missing package and what to type.

    Args:
        user: What needs them.
        extra: The extra of this package that installs them.
        modules: By the name of a package, the module it brings.
    """
    missing = [package for package, module in modules.items() if find_spec(module) is None]
    if missing:
        raise ProblemError(f"{user} needs {' and '.join(missing)}: type pip install 'forkmerge[{extra}]'.")


def check_name(kind: str, name: object) -> str:
    """Return `name` if it may safely appear in a file name and a report.

    Names become file names, table cells and HTML; a separator, a leading dot or a control character
    could leave the run's folder.
    """
    if not isinstance(name, str) or not name.strip():
        raise ProblemError(f"a {kind} name must be a non-empty string, got {name!r}.")
    if name != name.strip() or name.startswith(".") or any(c in "/\\:\0" or not c.isprintable() for c in name):
        raise ProblemError(
            f"the {kind} name {name!r} would leave its folder: use no '/', '\\', ':', control character, "
            "leading dot or outer spaces."
        )
    if len(name.encode()) > 100:
        raise ProblemError(f"the {kind} name {name[:20]!r}… is longer than 100 bytes: shorten it.")
    return name
