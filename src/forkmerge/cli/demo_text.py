"""What the demo says: tables and conclusions, all from its results."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from forkmerge.algorithms.table_data import Cell, Column, Table, show_seconds
from forkmerge.cli.print_tables import show_tables
from forkmerge.cli.terminal import say, stdout
from forkmerge.errors import command


def print_report(results: Mapping[str, Any], auxiliaries: Mapping[str, str]) -> None:
    """Print the tables and the conclusion on standard output."""
    console = stdout()
    console.print(
        f"[bold]Target: digits with {results['labels']} labels[/], the same for every method. ForkMerge searches with "
        "half of them for training and half for validation, then refits on all. Auxiliaries:",
        highlight=False,
    )
    for task, text in auxiliaries.items():
        console.print(f"  {task:<7} {text}", highlight=False)
    console.print()
    show_tables(console, [methods_table(results), *coefficient_tables(results)])
    console.print()
    for sentence in results["conclusion"]:
        console.print(sentence, highlight=False)
    files = results["files"]
    say(console, f"\nFigure: {files['figure']}\nNumbers: {files['results']}")
    page = command(f"report {shlex.quote(files['comparison'])}")
    say(console, f"`{page}` writes a page with figures.")
    processes = f"{results['workers']} processes" if results["workers"] > 1 else "one process"
    say(console, f"{show_seconds(results['seconds'])} in {processes}", style="dim")


def methods_table(results: Mapping[str, Any]) -> Table:
    """Return every method's accuracy, and its gain over single-task training, whose row comes first."""
    rows: list[tuple[Cell, ...]] = []
    for name, method in results["methods"].items():
        tally = f"{method['wins']} / {method['ties']} / {method['losses']}"
        gain = (Cell(method["gain"]), Cell(text=tally)) if rows else (Cell(), Cell())
        rows.append((Cell(text=name), Cell(method["mean"], method["std"]), *gain))
    columns = (
        Column("method", is_words=True),
        Column("test accuracy", scale=100, decimals=1),
        Column("gain", scale=100, decimals=1, signed=True),
        Column("won / tied / lost"),
    )
    count = len(results["seeds"])
    seeds = f"mean ± standard deviation over {count} seeds" if count > 1 else "one seed"
    note = (
        f"Accuracy in % on the other {results['test_examples']} digits, {seeds}; gain in points over single-task on "
        "the same seed, mean, and on how many seeds it was won, tied or lost."
    )
    return Table("", columns, tuple(rows), (note,))


def coefficient_tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the mean coefficients of every method that merges."""
    tables = []
    for name, method in results["methods"].items():
        means = method["mean_coefficients"]
        if means:
            columns = Column("round", is_words=True), *(Column(branch, decimals=2) for branch in means[0])
            rows = [(Cell(text=str(i)), *map(Cell, values.values())) for i, values in enumerate(means, start=1)]
            tables.append(Table(f"{name}: mean coefficients of each merge", columns, tuple(rows)))
    return tables


def conclude(
    methods: Mapping[str, Mapping[str, Any]], single: str, forkmerges: Sequence[str], auxiliaries: Sequence[str]
) -> list[str]:
    """Return in plain words what the numbers say, whatever they say.

    Args:
        methods: Every method's summary, by name.
        single: Name of the single-task method.
        forkmerges: Names of the ForkMerge forms; the last has one branch per auxiliary.
        auxiliaries: The auxiliary tasks.
    """
    alone = [f"{task} {100 * methods[f'with {task}']['gain']:+.1f}" for task in auxiliaries]
    sentences = [
        f"Trained along at full weight, each auxiliary moves the target's accuracy by: {', '.join(alone)} points.",
        _choice(methods[forkmerges[-1]], auxiliaries),
        *(_verdict(name, methods[name], methods[single]) for name in forkmerges),
    ]
    best = max(methods, key=lambda name: float(methods[name]["mean"]))
    if best not in forkmerges:
        top = 100 * methods[best]["mean"]
        sentences.append(f"The highest mean, {top:.1f}%, is that of {best!r}, for whoever knows that beforehand.")
    return sentences


def _choice(method: Mapping[str, Any], auxiliaries: Sequence[str]) -> str:
    """Say which auxiliaries were kept: those with at least an even share of the merges, against less than half one."""
    rounds = method["mean_coefficients"]
    even = 1 / len(rounds[0])
    uses: dict[str, list[str]] = {"kept": [], "used a little of": [], "refused": []}
    for task in auxiliaries:
        share = fmean(coefficients.get(task, 0.0) for coefficients in rounds)
        word = "kept" if share >= even else "used a little of" if share >= even / 2 else "refused"
        uses[word].append(f"{task} ({share:.2f})")
    parts = [f"{word} {_listed(tasks)}" for word, tasks in uses.items() if tasks]
    return (
        f"With one branch per auxiliary, the merges {', '.join(parts)}: mean coefficients, of which {even:.2f} would "
        "be an even share."
    )


def _listed(items: Sequence[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _verdict(name: str, method: Mapping[str, Any], single: Mapping[str, Any]) -> str:
    gain, runs, interval = 100 * method["gain"], len(method["accuracy"]), method["gain_interval"]
    numbers = f"{100 * method['mean']:.1f}% against {100 * single['mean']:.1f}% ({gain:+.1f} points)"
    if gain == 0:
        return f"{name}: as good as single-task, {numbers}."
    word, count = ("better", method["wins"]) if gain > 0 else ("worse", method["losses"])
    if runs == 1:
        return f"{name}: {word} than single-task, {numbers}, on one seed, which proves nothing."
    is_sure = interval is not None and (interval[0] > 0 or interval[1] < 0)  # 95 %, paired: few seeds prove little
    sure = "more than chance explains" if is_sure else "which may be chance"
    return f"{name}: {word} than single-task, {numbers}, on {count} of {runs} seeds, {sure}."
