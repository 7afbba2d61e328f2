"""The command `forkmerge`."""

import errno
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

_LOST = 74  # EX_IOERR of sysexits.h
_NOBODY_READS = 141  # as programs that a SIGPIPE ends: 128 + 13


def main() -> None:
    """Run the command line; what it advises to type begins with the name that it was called by.

    Output that is lost ends no command: its work is done first, and the exit code tells.
    """
    os.environ.setdefault("FORKMERGE_COMMAND", _name())
    try:
        _call()
    except KeyboardInterrupt:  # while the first modules are imported
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise SystemExit(128 + signal.SIGINT) from None


def _call() -> None:
    from forkmerge.engine.executors.lost_output import tolerate_lost_output

    tolerate_lost_output()
    from forkmerge.cli.terminal import ends_once

    try:
        with ends_once():
            from forkmerge.cli.commands import app

            app(prog_name=os.environ["FORKMERGE_COMMAND"])
    except SystemExit as end:
        raise SystemExit(end.code or _code_of_output()) from None


def _code_of_output() -> int:
    """Return the exit code of a command that is done, by what became of its output."""
    from forkmerge.engine.executors.lost_output import lost_output

    lost = lost_output(sys.stdout)
    if lost is None:
        return 0
    if lost.errno == errno.EPIPE:
        return _NOBODY_READS
    print(f"error: standard output could not be written: {lost.strerror}. The command itself is done.", file=sys.stderr)
    return _LOST


def _name() -> str:
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return shlex.join([sys.executable if shutil.which("python") != sys.executable else "python", "-m", __name__])
    on_path = shutil.which("forkmerge")
    is_elsewhere = called.name == "forkmerge" and called.exists() and (on_path is None or not called.samefile(on_path))
    return shlex.quote(sys.argv[0]) if is_elsewhere else "forkmerge"
