"""Every error the library raises on purpose, the checks that raise them, and what is shown of the user's own."""

from __future__ import annotations

import math
import os
import re
import site
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

_FACT = "forkmerge: "
_OURS = Path(__file__).parent
_INSTALLED = (_OURS, *map(Path, (sysconfig.get_paths()["stdlib"], *site.getsitepackages())))

# Control characters but tab and new line, marks that turn the direction of writing around, and halves of characters.
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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


class ResourceError(ForkMergeError):
    """The machine has no memory, open files or processes left for a run; what is in its folder is whole."""


class WorkerError(RuntimeError):
    """Something failed in a worker; the message is the traceback from there."""


def add_fact(error: BaseException, text: str) -> None:
    """Add a note to an error of the user's code; Python shows it below the message from 3.11 on."""
    if not isinstance(error, ForkMergeError):  # which says all that there is to say
        notes = [*getattr(error, "__notes__", ()), f"{_FACT}{text}"]
        error.__notes__ = notes  # type: ignore[attr-defined]  # what `add_note` does, which 3.10 lacks


def facts_of(error: BaseException) -> list[str]:
    """Return what `add_fact` has added."""
    return [note for note in getattr(error, "__notes__", ()) if str(note).startswith(_FACT)]


def has_origin(error: BaseException) -> bool:
    """Whether an error says which of the user's functions or data sets it came from."""
    return any(str(fact).startswith(f"{_FACT}in ") for fact in facts_of(error))


def shows_all_frames() -> bool:
    """Whether tracebacks keep our own frames: `forkmerge --debug`, or FORKMERGE_DEBUG=1."""
    return os.environ.get("FORKMERGE_DEBUG", "") not in ("", "0")


def user_traceback(error: BaseException) -> str | None:
    """Return the traceback of an error of the user's code from their first frame on, without ours, its facts last.

    An error that says where it came from has none of their frames where torch raises it, for what their code gave. One
    of a worker's arrives as text. None is returned of any other without a frame of theirs.
    """
    facts = facts_of(error)
    if isinstance(error, WorkerError):
        return "\n".join([str(error).rstrip(), *facts])
    shown = traceback.TracebackException.from_exception(error)
    frames = list(shown.stack)
    inner = max((i for i, frame in enumerate(frames) if Path(frame.filename).is_relative_to(_OURS / "cli")), default=-1)
    rest = [frame for frame in frames[inner + 1 :] if not Path(frame.filename).is_relative_to(_OURS)]
    first = next((i for i, frame in enumerate(rest) if _is_users(frame.filename)), None)
    if first is None and not has_origin(error):
        return None
    shown.stack[:] = [] if first is None else rest[first:]  # before that is how we got there, through torch for example
    text = "".join(shown.format_exception_only() if first is None else shown.format())
    return text + "".join(f"{fact}\n" for fact in facts if fact not in text)  # 3.10 leaves notes out


def _is_users(file: str) -> bool:
    return not file.startswith("<frozen") and not any(Path(file).is_relative_to(folder) for folder in _INSTALLED)


def command(words: str) -> str:
    """Return what to type for a `forkmerge` command: by the name it was called by, `./run` for example."""
    return f"{os.environ.get('FORKMERGE_COMMAND', 'forkmerge')} {words}"


def printable(text: str) -> str:
    r"""Return text without what a terminal would obey, or could not print: it becomes its code, such as \u001b."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def unknown_name(kind: str, name: object, choices: Iterable[object]) -> str:
    """Say that `name` is no `kind`, list what exists and offer the closest match."""
    names = [str(item) for item in choices]
    close = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {str(name)!r}.{hint} Known: {', '.join(names) or 'none'}."


def check_keys(where: str, table: object, names: Iterable[str]) -> None:
    """Refuse what is no table, and keys that a table does not have."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table, got {table!r}.")
    for key in table:
        if key not in names:
            raise ConfigError(f"{where}: " + unknown_name("key", key, names))


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether a value is an integer of at least `least`; True and False are not integers here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(name: str, value: object, *, error: type[ForkMergeError] = ProblemError) -> int:
    """Return a positive integer, or say by what name it is none."""
    if not is_count(value):
        raise error(f"{name} must be a positive integer, got {value!r}.")
    return value


def check_flag(name: str, value: object) -> None:
    """Refuse by name what is neither True nor False; text would count as true, whatever it says."""
    if not isinstance(value, bool):
        raise ProblemError(f"{name} must be True or False, got {value!r}.")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number; True and False are not numbers here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
