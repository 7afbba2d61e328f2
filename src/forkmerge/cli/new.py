"""The command `forkmerge new`."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path

from forkmerge.cli.terminal import say, stdout
from forkmerge.errors import ConfigError, StoreError, command


def write_example(path: Path) -> None:
    """Write a commented, runnable example; a file that exists stays as it is."""
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigError(f"{path} must be importable: give a name such as my_problem.py.")
    text = resources.files("forkmerge").joinpath("cli/templates/my_problem.py").read_text("utf-8")
    for words in ("run", "show"):  # `runs` begins like the first
        text = text.replace(f"forkmerge {words}", command(words))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("my_problem", path.stem))
    except FileExistsError:
        raise StoreError(f"{path} exists: choose another name, or delete it first.") from None
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}.") from None
    move = "" if path.parent == Path() else f"cd {shlex.quote(str(path.parent))} && "
    say(stdout(), f"wrote {path}. It runs as it stands:\n\n    {move}{command(f'run {path.stem}:recipe')}")
