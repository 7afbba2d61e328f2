"""The command `forkmerge report`."""

from __future__ import annotations

from pathlib import Path

from forkmerge.cli.terminal import print_json, say, stdout
from forkmerge.report import write_figure, write_report


def write_page_or_figure(folder: Path, out: Path | None, figure: str | None, *, as_json: bool) -> None:
    """Write the page of a folder, or one of its figures."""
    path = write_report(folder, out) if figure is None else write_figure(folder, figure, out or Path(f"{figure}.pdf"))
    print_json({"file": str(path)}) if as_json else say(stdout(), str(path))
