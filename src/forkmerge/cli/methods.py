"""The command `forkmerge methods`."""

from __future__ import annotations

import inspect

import typer

from forkmerge.algorithms.table_data import word_table
from forkmerge.cli.print_tables import show_tables
from forkmerge.cli.terminal import print_json, say, stdout
from forkmerge.errors import command
from forkmerge.experiments.compared.method_words import ABOUT
from forkmerge.methods import method_from, methods_table
from forkmerge.methods.registry import split_flavour
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
    runs = word_table("whole runs", ("word", "what it is"), ABOUT.items())
    notes = (
        f"`{command('methods NAME')}` says more of one: state, heads, options, paper.",
        "Case, - and _ do not matter.",
        "WORD+METHOD uses a method inside forkmerge, forkmerge-aux, posttrain or grid: forkmerge+pcgrad.",
        "WORD[key=value,…] sets options of a method, its algorithm or lr: forkmerge[interval=500], ew[lr=0.003].",
        "authors_scripts:WORD runs a method as ForkMerge's authors do in their scripts: authors_scripts:gcs; "
        "authors_scripts alone is all sixteen.",
        "torchjd:NAME is any scalarizer, weighting or aggregator of TorchJD: torchjd:UPGrad.",
    )
    facts = [(row["name"], *(str(row[fact]) for fact in shown)) for row in rows]
    combined = word_table("methods that combine the tasks of a step", ("method", *shown), facts, notes)
    if markdown:
        typer.echo(to_markdown([runs, combined]), nl=False)
    else:
        show_tables(stdout(), [runs, combined])


def show_method(name: str) -> None:
    """Print a method's documentation, and with which options a flavour of it is made."""
    method = method_from(name)
    title = repr(method) if split_flavour(name)[0] else type(method).__name__
    say(stdout(), f"{title}\n\n{inspect.getdoc(type(method))}")
