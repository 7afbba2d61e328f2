"""The command `forkmerge methods`."""

from __future__ import annotations

import inspect

import typer

from forkmerge.algorithms.table_data import Cell, Column, Table
from forkmerge.cli.print_tables import show_tables
from forkmerge.cli.terminal import print_json, say, stdout
from forkmerge.errors import command
from forkmerge.experiments.compared_methods import ABOUT
from forkmerge.methods import method_from, methods_table
from forkmerge.report.table import to_markdown

_BRIEF = ("uses", "target", "passes", "memory")
_FACTS = ("uses", "state", "passes", "memory", "target", "heads", "paper")


def list_methods(*, as_json: bool, markdown: bool) -> None:
    """List the words of a comparison and the methods that combine tasks; Markdown has all facts about them."""
    rows = methods_table()
    if as_json:
        print_json({"words": ABOUT, "methods": rows})
        return
    shown = _FACTS if markdown else _BRIEF
    words = [(Cell(text=word), Cell(text=text)) for word, text in ABOUT.items()]
    runs = Table("whole runs", tuple(Column(name, is_words=True) for name in ("word", "what it is")), tuple(words))
    names = [Column(title, is_words=True) for title in ("method", *shown)]
    facts = [(Cell(text=row["name"]), *(Cell(text=str(row[fact])) for fact in shown)) for row in rows]
    notes = (
        f"`{command('methods NAME')}` says more of one: state, heads, options, paper.",
        "Case, - and _ do not matter.",
        "WORD+METHOD uses a method inside forkmerge, forkmerge-aux, posttrain or grid: forkmerge+pcgrad.",
        "WORD[key=value,…] sets options of a method, its algorithm or lr: forkmerge[interval=500], ew[lr=0.003].",
        "torchjd:NAME is any scalarizer, weighting or aggregator of TorchJD: torchjd:UPGrad.",
    )
    combined = Table("methods that combine the tasks of a step", tuple(names), tuple(facts), notes)
    if markdown:
        typer.echo(to_markdown([runs, combined]), nl=False)
    else:
        show_tables(stdout(), [runs, combined])


def show_method(name: str) -> None:
    """Print a method's documentation."""
    method = method_from(name)
    say(stdout(), f"{type(method).__name__}\n\n{inspect.getdoc(type(method))}")
