"""The command `forkmerge report`."""

from __future__ import annotations

from pathlib import Path

from forkmerge.cli.saved_runs import WHOLE
from forkmerge.cli.terminal import print_json, say, stdout
from forkmerge.engine.storage.json_files import interpreting
from forkmerge.report import write_figure, write_report


def write_page_or_figure(folder: Path, out: Path | None, figure: str | None, *, as_json: bool) -> None:
    """Write the page of a folder, or one of its figures."""
    with interpreting(folder, WHOLE):
        drawing = out or Path(f"{figure}.pdf")
        path = write_report(folder, out) if figure is None else write_figure(folder, figure, drawing)
    print_json({"file": str(path)}) if as_json else say(stdout(), str(path))
