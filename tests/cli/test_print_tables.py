"""Tables as the command prints them."""

from __future__ import annotations

import io

from rich.console import Console

from forkmerge.algorithms.table_data import word_table
from forkmerge.cli.print_tables import show_tables


def test_a_title_and_a_note_may_be_wider_than_their_table():
    title, note = "what each of these two words is good for", "a note that is longer than the table, too"
    tables = [word_table(title, ("word", "use"), [("[a]", "b")], [note]), word_table("", ("c",), [("d",)])]
    text = io.StringIO()
    show_tables(Console(file=text, width=60), tables)
    assert [line.rstrip() for line in text.getvalue().splitlines()] == [
        title,
        "word  use",
        "[a]   b",
        f"  {note}",
        "",
        "c",
        "d",
    ]
