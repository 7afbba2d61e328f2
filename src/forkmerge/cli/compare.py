"""The commands `forkmerge compare` and `forkmerge methods`."""

from __future__ import annotations

import inspect
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from forkmerge.algorithms.table_data import Cell, Column, Table
from forkmerge.cli.comparison_progress import ComparisonView
from forkmerge.cli.progress import watching
from forkmerge.cli.terminal import (
    interruptible,
    print_json,
    readable_warnings,
    say,
    stderr,
    stdout,
    stdout_for_json,
)
from forkmerge.errors import ConfigError, command
from forkmerge.experiments.compare_options import options_from
from forkmerge.experiments.compared_methods import ABOUT
from forkmerge.experiments.comparison import plan_comparison, run_comparison
from forkmerge.experiments.cost_of_comparison import estimate_comparison
from forkmerge.experiments.events import Watch
from forkmerge.experiments.recipe import read_settings
from forkmerge.experiments.results_file import write_records
from forkmerge.experiments.run_results import read_plan
from forkmerge.methods import method_from, methods_table
from forkmerge.methods.option_syntax import option_from, split_assignment, split_words
from forkmerge.report.comparison_tables import tables_from, write_tables
from forkmerge.report.cost_table import cost_table
from forkmerge.report.table import to_markdown, to_rich

_BRIEF = ("uses", "target", "passes", "memory")
_FACTS = ("uses", "state", "passes", "memory", "target", "heads", "paper")
_SECONDS_BETWEEN_RECORDS = 60.0
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.command()(compare)
    app.command()(methods)


def compare(
    problem: Annotated[
        str,
        typer.Argument(
            metavar="PROBLEM",
            help="PROBLEM.toml or module:function; or an earlier comparison's folder or records, to show it.",
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="WORD[KEY=VALUE,…],…",
            help="Words of `forkmerge methods`, comma-separated, with options; paper: the paper's sixteen; all.  "
            "[default: paper]",
        ),
    ] = None,
    targets: Annotated[
        str | None, typer.Option(help="Target tasks, comma-separated, or all.  [default: the recipe's own]")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Repetitions: seeds 0, 1, ….  [default: 5]")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes, of one thread each.  [default: 2]")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the comparison; one that exists is continued.  [default: in runs/]")
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,…", help="Choose on validation, per method: lr, interval or a method's option."
        ),
    ] = None,
    tune_seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds that the choice is made with.  [default: 1]")
    ] = None,
    equal_labels: Annotated[
        bool | None,
        typer.Option(
            "--equal-labels/--no-equal-labels", help="In the end, train all methods on training and validation data."
        ),
    ] = None,
    equal_compute: Annotated[
        bool | None,
        typer.Option(
            "--equal-compute/--no-equal-compute", help="Add what the compute of ForkMerge would have bought otherwise."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of a recipe file, e.g. steps=500.")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Also keep the numbers of all runs in one file, made to be committed."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run and cost, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Compare methods over targets and seeds: Δ_m, intervals, costs.

    A [compare] table in PROBLEM.toml gives these options other defaults.
    Run it again to continue what was interrupted, to try again what failed, or to add methods, targets and seeds.
    """
    from forkmerge.cli.run import overrides_from  # it imports this module

    if Path(problem).is_dir() or problem.endswith(".json"):
        _show_earlier(problem, records, as_json)
        return
    console, overrides = stderr(), overrides_from({}, settings or [])
    with stdout_for_json(as_json):
        workers = options_from(read_settings(problem, overrides)[0].get("compare", {}), workers=workers).workers
        comparison = plan_comparison(
            problem,
            methods=methods,
            targets=targets,
            seeds=seeds,
            settings=overrides,
            tune=tune_from(tune or []) or None,
            tune_seeds=tune_seeds,
            equal_labels=equal_labels,
            equal_compute=equal_compute,
        )
        cost = estimate_comparison(comparison, workers) if dry_run else None
    if cost is not None:
        print_json(asdict(cost)) if as_json else _show([cost_table(cost)])
        return
    with stdout_for_json(as_json):
        folder = out or Path("runs") / f"compare-{_stem(problem)}"
        interrupts = interruptible(console, lambda: _how_to_go_on(folder))
        with (
            interrupts,
            readable_warnings(console),
            watching(console, ComparisonView(workers)) as watch,
            keeping_records(folder, records, watch) as watch_and_keep,
        ):
            run_comparison(comparison, folder, workers=workers, watch=watch_and_keep)
    _finish(folder, as_json)


def _show_earlier(problem: str, records: Path | None, as_json: bool) -> None:
    changing = ("--methods", "--targets", "--seeds", "--tune", "--set", "--equal-labels", "--equal-compute")
    given = [word for word in sys.argv if word.split("=")[0] in changing]
    if given:
        raise ConfigError(
            f"{problem} is an earlier comparison, which is only shown: to change {given[0]}, give the problem "
            f"and --out {problem}."
        )
    if records is not None:
        write_records(problem, records)
    _finish(Path(problem), as_json)


@contextmanager
def keeping_records(folder: Path, file: Path | None, watch: Watch) -> Iterator[Watch]:
    """Write a comparison's records into a file while it runs, now and then, and at its end, however that comes."""
    if file is None:
        yield watch
        return
    written = time.monotonic()

    def keep(event: Mapping[str, Any]) -> None:
        nonlocal written
        watch(event)
        if event["event"] == "end" and time.monotonic() - written >= _SECONDS_BETWEEN_RECORDS:
            write_records(folder, file)
            written = time.monotonic()

    try:
        yield keep
    finally:
        if read_plan(folder) is not None:
            write_records(folder, file)


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[METHOD]", help="Everything about one method.", show_default=False)
    ] = None,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a document.")] = False,
) -> None:
    """List the methods that can be compared, and what each one costs."""
    rows = methods_table()
    if as_json:
        print_json({"words": ABOUT, "methods": rows})
        return
    if name is not None:
        _show_method(name)
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
        return
    _show([runs, combined])


def _show_method(name: str) -> None:
    """Print a method's documentation."""
    method = method_from(name)
    say(stdout(), f"{type(method).__name__}\n\n{inspect.getdoc(type(method))}")


def tune_from(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """Return what `--tune key=v1,v2` says."""
    found: dict[str, list[Any]] = {}
    for assignment in assignments:
        key, text = split_assignment(assignment)
        values = [option_from(f"--tune {key}", part) for part in split_words(text)]
        if not key or not values:
            raise ConfigError(f"--tune {assignment}: write key=v1,v2,…, e.g. --tune lr=0.003,0.01,0.03.")
        if key == "lr" and not all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values):
            raise ConfigError(f"--tune {assignment}: learning rates are positive numbers.")
        found[key] = list(dict.fromkeys(values))
    return found


def _stem(problem: str) -> str:
    module, _, function = problem.partition(":")
    if problem.endswith(".toml"):
        return Path(problem).stem
    parts = [module.rsplit(".", 1)[-1], *([function] if function not in ("", "recipe") else [])]
    return "-".join(parts)


def _finish(folder: Path, as_json: bool) -> None:
    """Write and print the tables; a run that failed makes the command fail, after everything else is done."""
    data = write_tables(folder)
    if as_json:
        print_json(data)
    else:
        _show(tables_from(folder))
        if data["files"]:
            say(stdout(), "\nwritten to " + ", ".join(data["files"]))
        say(stdout(), f"`{command(f'report {shlex.quote(str(folder))}')}` writes a page with figures.")
    if data["failures"]:
        count = len(data["failures"])
        say(stderr(), f"{count} run{'s' * (count > 1)} failed; the same command tries again.", style="red")
        raise typer.Exit(1)


def _show(tables: Sequence[Table]) -> None:
    console = stdout()
    for index, table in enumerate(tables):
        if index:
            console.print()
        console.print(to_rich(table))
        for note in table.notes:
            say(console, f"  {note}", style="dim")


def _how_to_go_on(folder: Path) -> str | None:
    if read_plan(folder) is None:
        return None
    return f"interrupted. What has ended is kept; continue with: {command(shlex.join(sys.argv[1:]))}"
