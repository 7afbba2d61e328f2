"""What the demo says: progress, tables and conclusions, all from its results."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from forkmerge.experiments.paired_statistics import t_quantile

_PLAIN_LINES = 10  # progress lines of a whole demo where there is no terminal


@contextmanager
def following(runs: int, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to be called with the cost of every finished run; it shows the time left on standard error.

    Args:
        runs: How many runs there are.
        total: Their cost together, in any unit.
    """
    started, done, finished = time.perf_counter(), 0, 0

    def count(cost: int) -> str:
        nonlocal done, finished
        done, finished = done + cost, finished + 1
        left = (time.perf_counter() - started) * (total - done) / done
        return f"{finished} of {runs} runs" + (f", about {_duration(left)} left" if done < total else "")

    if not sys.stderr.isatty():
        print(f"demo: {runs} runs, the longest first", file=sys.stderr, flush=True)

        def advance_plain(cost: int) -> None:
            before = done * _PLAIN_LINES // total
            line = count(cost)
            if done * _PLAIN_LINES // total > before:
                print(f"demo: {line}", file=sys.stderr, flush=True)

        yield advance_plain
        return
    columns = (TextColumn("demo"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{runs} runs, the longest first", total=total)
        yield lambda cost: bar.update(task, description=count(cost), completed=done)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def print_report(results: Mapping[str, Any]) -> None:
    """Print the tables and the conclusion on standard output."""
    console = Console(highlight=False)
    seeds = _seeds(len(results["seeds"]))
    console.print(
        f"[bold]Target: digits with {results['labels']} labels[/], the same for every method. ForkMerge searches with "
        "half of them for training and half for validation, then refits on all. Auxiliaries:"
    )
    console.print(_table(["", ""], [list(pair) for pair in list(results["tasks"].items())[1:]], numbers=False))
    console.print()
    console.print(_comparison(results["methods"]))
    console.print(
        f"Accuracy in % on the other {results['test_examples']} digits, mean ± standard deviation over {seeds}; "
        "gain in points over single-task on the same seed, mean, and on how many seeds it was won, tied or lost.",
        style="dim",
    )
    for name, method in results["methods"].items():
        if method["coefficients"]:
            console.print(f"\n[bold]{name}[/]: mean coefficients of each merge")
            console.print(_coefficients(method["mean_coefficients"]))
    console.print()
    for sentence in results["conclusion"]:
        console.print(sentence)
    processes = f"{results['workers']} processes" if results["workers"] > 1 else "one process"
    console.print(f"\nFigure: {results['files']['figure']}\nNumbers: {results['files']['results']}", soft_wrap=True)
    console.print(f"{_duration(results['seconds'])} in {processes}", style="dim")


def _seeds(count: int) -> str:
    return f"{count} seeds" if count > 1 else "one seed"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(head))
    for place, title in enumerate(head):
        table.add_column(title, justify="right" if numbers and place else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _comparison(methods: Mapping[str, Mapping[str, Any]]) -> Table:
    rows: list[list[str]] = []
    for name, method in methods.items():
        spread = "" if method["std"] is None else f" ± {100 * method['std']:.1f}"
        row = [name, f"{100 * method['mean']:.1f}{spread}", f"{100 * method['gain']:+.1f}"]
        row.append(f"{method['wins']} / {method['ties']} / {method['losses']}")
        rows.append(row if rows else [*row[:2], "", ""])  # the first is the baseline itself
    return _table(["method", "test accuracy", "gain", "won / tied / lost"], rows)


def _coefficients(rounds: Sequence[Mapping[str, float]]) -> Table:
    rows = [[str(index), *(f"{value:.2f}" for value in found.values())] for index, found in enumerate(rounds, start=1)]
    return _table(["round", *rounds[0]], rows)


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
    said: dict[str, list[str]] = {"kept": [], "used a little of": [], "refused": []}
    for task in auxiliaries:
        share = mean(coefficients.get(task, 0.0) for coefficients in rounds)
        word = "kept" if share >= even else "used a little of" if share >= even / 2 else "refused"
        said[word].append(f"{task} ({share:.2f})")
    parts = [f"{word} {_listed(tasks)}" for word, tasks in said.items() if tasks]
    return (
        f"With one branch per auxiliary, the merges {', '.join(parts)}: mean coefficients, of which {even:.2f} would "
        "be an even share."
    )


def _listed(items: Sequence[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _verdict(name: str, method: Mapping[str, Any], single: Mapping[str, Any]) -> str:
    gain, runs = 100 * method["gain"], len(method["accuracy"])
    numbers = f"{100 * method['mean']:.1f}% against {100 * single['mean']:.1f}% ({gain:+.1f} points)"
    if gain == 0:
        return f"{name}: as good as single-task, {numbers}."
    word, count = ("better", method["wins"]) if gain > 0 else ("worse", method["losses"])
    if runs == 1:
        return f"{name}: {word} than single-task, {numbers}, on one seed, which proves nothing."
    # A 95 % interval of paired differences, by the t distribution: few seeds prove little.
    margin = t_quantile(0.975, runs - 1) * method["gain_std"] / math.sqrt(runs)
    sure = "more than chance explains" if abs(method["gain"]) > margin else "which may be chance"
    return f"{name}: {word} than single-task, {numbers}, on {count} of {runs} seeds, {sure}."
