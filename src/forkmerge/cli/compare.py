"""The command `forkmerge compare`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from forkmerge.algorithms.events.run_events import Event, OnEvent
from forkmerge.cli.arguments import name_of, overrides_from, tune_from
from forkmerge.cli.comparison_progress import ComparisonView
from forkmerge.cli.executor_arguments import ExecutorArguments
from forkmerge.cli.print_tables import show_tables
from forkmerge.cli.progress import watching
from forkmerge.cli.saved_runs import WHOLE
from forkmerge.cli.terminal import interruptible, print_json, readable_warnings, say, stderr, stdout, stdout_for_json
from forkmerge.engine.executors.executor_options import ExecutorOptions, LocalOptions
from forkmerge.engine.storage.atomic_files import write_atomically
from forkmerge.engine.storage.json_files import interpreting
from forkmerge.errors import ConfigError, command
from forkmerge.experiments.compare_options import options_from
from forkmerge.experiments.compared.continued_records import restore_comparison
from forkmerge.experiments.comparison import Comparison, plan_comparison, run_comparison
from forkmerge.experiments.cost_of_comparison import estimate_comparison
from forkmerge.experiments.events import JobEnded
from forkmerge.experiments.joined_comparisons import read_joined
from forkmerge.experiments.recipe import read_settings
from forkmerge.experiments.results_file import to_text, write_records
from forkmerge.experiments.run_results import read_plan
from forkmerge.experiments.summary import summarise
from forkmerge.report.comparison_tables import tables_from, tables_of, write_tables
from forkmerge.report.cost_table import cost_table

_SECONDS_BETWEEN_RECORDS = 60.0


@dataclass(frozen=True)
class CompareCommand:
    """What `forkmerge compare` was asked for.

    Args:
        problem: A recipe, or the folder or the records of an earlier comparison.
        options: Those that say what is compared, as far as they were typed: those of `plan_comparison`.
        where: Where; processes of this machine, the recipe's number or two, unless something is said.
        out: The comparison's folder; None for one in runs/ named after the problem.
        records: A file for the numbers of all runs.
        as_json: Whether to print JSON.
        typed: What to type to continue it.
        others: Further earlier comparisons to show together with it.
        earlier: Records of an earlier comparison with the same settings, to go on from in a new folder.
    """

    problem: str
    options: Mapping[str, Any]
    where: ExecutorArguments
    out: Path | None
    records: Path | None
    as_json: bool
    typed: str
    others: Sequence[str] = ()
    earlier: Path | None = None

    def show_earlier(self) -> None:
        """Show an earlier comparison; what it compares cannot be changed that way."""
        if self.options:
            option = {"settings": "--set"}.get(name := next(iter(self.options)), f"--{name.replace('_', '-')}")
            raise ConfigError(
                f"{self.problem} is an earlier comparison, which is only shown: to change {option}, give the problem "
                f"and --out {self.problem}."
            )
        with interpreting(self.problem, WHOLE):
            if self.others:
                self._show_together()
                return
            if self.records is not None:
                write_records(self.problem, self.records)
            finish(Path(self.problem), self.as_json)

    def _show_together(self) -> None:
        """Show several comparisons as one; nothing is written but the records that are asked for."""
        plan, results = read_joined([self.problem, *self.others])
        summary = summarise(results, plan)
        if self.records is not None:
            write_atomically(self.records, to_text(plan, results).encode("utf-8", "backslashreplace"))
        if self.as_json:
            print_json({**vars(summary), "plan": plan, "files": []})
        else:
            show_tables(stdout(), tables_of(summary))

    def show_cost(self) -> None:
        """Say what would run and cost."""
        with stdout_for_json(self.as_json):
            comparison, executor = self._plan()
            cost = estimate_comparison(comparison, executor.workers)
        print_json(cost) if self.as_json else show_tables(stdout(), [cost_table(cost)])

    def run(self) -> None:
        """Compare, and print the tables."""
        folder = self.out or Path("runs") / f"compare-{name_of(self.problem)}"
        with stdout_for_json(self.as_json):
            comparison, executor = self._plan()
            if self.earlier is not None and read_plan(folder) is None:
                count = restore_comparison(comparison, folder, self.earlier)
                say(stderr(), f"{count} results of {self.earlier} need not be made again.")
            carry_out(comparison, folder, executor=executor, typed=self.typed, records=self.records)
        finish(folder, self.as_json)

    def _plan(self) -> tuple[Comparison, ExecutorOptions]:
        if self.others:
            raise ConfigError(
                f"--with shows earlier comparisons together, and {self.problem} is none: give its folder or records."
            )
        options = dict(self.options)
        settings, tune = overrides_from({}, options.pop("settings", [])), tune_from(options.pop("tune", []))
        tables = read_settings(self.problem, settings)[0]
        workers = options_from(tables.get("compare", {}), workers=self.where.workers).workers
        executor = self.where.options(tables.get("execution")) or LocalOptions(workers)
        return plan_comparison(self.problem, settings=settings, tune=tune or None, **options), executor


def carry_out(
    comparison: Comparison, folder: Path, *, executor: ExecutorOptions, typed: str, records: Path | None = None
) -> None:
    """Do the runs of a comparison, with progress on standard error.

    Args:
        comparison: What is compared.
        folder: The comparison's folder.
        executor: Where runs are done.
        typed: What to type to continue it.
        records: A file for the numbers of all runs.
    """
    console = stderr()
    with (
        interruptible(console, lambda: _how_to_go_on(folder, typed)),
        readable_warnings(console),
        watching(console, ComparisonView(executor.workers)) as show,
        keeping_records(folder, records, show) as show_and_keep,
    ):
        run_comparison(comparison, folder, executor=executor, on_event=show_and_keep)


@contextmanager
def keeping_records(folder: Path, file: Path | None, on_event: OnEvent) -> Iterator[OnEvent]:
    """Write a comparison's records into a file while it runs, now and then, and at its end, however that comes."""
    if file is None:
        yield on_event
        return
    written = time.monotonic()

    def keep(event: Event) -> None:
        nonlocal written
        on_event(event)
        if isinstance(event, JobEnded) and time.monotonic() - written >= _SECONDS_BETWEEN_RECORDS:
            write_records(folder, file)
            written = time.monotonic()

    try:
        yield keep
    finally:
        if read_plan(folder) is not None:
            write_records(folder, file)


def finish(folder: Path, as_json: bool) -> None:
    """Write and print the tables; a run that failed makes the command fail, after everything else is done."""
    data = write_tables(folder)
    if as_json:
        print_json(data)
    else:
        show_tables(stdout(), tables_from(folder))
        if data["files"]:
            say(stdout(), "\nwritten to " + ", ".join(data["files"]))
        say(stdout(), f"`{command(f'report {shlex.quote(str(folder))}')}` writes a page with figures.")
    if data["failures"]:
        count = len(data["failures"])
        say(stderr(), f"{count} run{'s' * (count > 1)} failed; the same command tries again.", style="red")
        raise typer.Exit(1)


def _how_to_go_on(folder: Path, typed: str) -> str | None:
    if read_plan(folder) is None:
        return None
    return f"interrupted. What has ended is kept; continue with: {command(typed)}"
