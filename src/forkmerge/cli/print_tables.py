"""Tables as the command prints them."""

from __future__ import annotations

from collections.abc import Sequence

from forkmerge.algorithms.table_data import Table
from forkmerge.cli.terminal import say, stdout
from forkmerge.report.table import to_rich


def show_tables(tables: Sequence[Table]) -> None:
    """Print tables, each with its notes."""
    console = stdout()
    for index, table in enumerate(tables):
        if index:
            console.print()
        console.print(to_rich(table))
        for note in table.notes:
            say(console, f"  {note}", style="dim")
