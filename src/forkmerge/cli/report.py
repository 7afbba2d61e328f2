"""The command `forkmerge report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forkmerge.cli.terminal import print_json, say, stdout


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command()(report)


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="The folder of a run, a comparison or a diagnosis; or a comparison's records."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page; or, with --figure, fig.pdf, .svg or .png.  [default: report.html in DIR]"),
    ] = None,
    figure: Annotated[
        str | None, typer.Option(metavar="NAME", help="Draw one figure for a paper instead of the page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
) -> None:
    """Write one self-contained page: verdicts, tables, figures."""
    from forkmerge.report import write_figure, write_report

    if figure is not None:
        path = write_figure(folder, figure, out or Path(f"{figure}.pdf"))
    else:
        path = write_report(folder, out)
    if as_json:
        print_json({"file": str(path)})
    else:
        say(stdout(), str(path))
