"""Tables as the command prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from forkmerge.algorithms.table_data import Table
from forkmerge.cli.terminal import say
from forkmerge.report.table import to_rich


def show_tables(console: Console, tables: Sequence[Table]) -> None:
    """Print tables, each with its notes."""
    for index, table in enumerate(tables):
        if index:
            console.print()
        show_table(console, table)
        for note in table.notes:
            say(console, f"  {note}", style="dim")


def show_table(console: Console, table: Table) -> None:
    """Print a table under its title, which may be wider than the table."""
    if table.title:
        say(console, table.title, style="italic")
    console.print(to_rich(replace(table, title="")))
