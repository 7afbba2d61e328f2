"""The command `forkmerge`."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def main() -> None:
    """Run the command line; what it advises to type begins with the name that it was called by."""
    os.environ.setdefault("FORKMERGE_COMMAND", _name())
    from forkmerge.cli.terminal import ends_once

    with ends_once():
        from forkmerge.cli.commands import app

        app(prog_name=os.environ["FORKMERGE_COMMAND"])


def _name() -> str:
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return shlex.join([sys.executable if shutil.which("python") != sys.executable else "python", "-m", __name__])
    on_path = shutil.which("forkmerge")
    is_elsewhere = called.name == "forkmerge" and called.exists() and (on_path is None or not called.samefile(on_path))
    return shlex.quote(sys.argv[0]) if is_elsewhere else "forkmerge"
