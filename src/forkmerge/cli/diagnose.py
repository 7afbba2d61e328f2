"""The command `forkmerge diagnose`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forkmerge.analysis.diagnosis.budget import seconds_from
from forkmerge.analysis.diagnosis.diagnosis import diagnose
from forkmerge.cli.arguments import name_of
from forkmerge.cli.comparison_progress import ComparisonView
from forkmerge.cli.executor_arguments import ExecutorArguments
from forkmerge.cli.print_tables import show_tables
from forkmerge.cli.progress import watching
from forkmerge.cli.terminal import interruptible, print_json, readable_warnings, say, stderr, stdout, stdout_for_json
from forkmerge.engine.executors.executor_options import LocalOptions
from forkmerge.errors import command
from forkmerge.experiments.recipe import load_recipe
from forkmerge.report.verdict_table import verdict_table


def diagnose_problem(
    problem: str,
    overrides: Mapping[str, Any],
    *,
    budget: str,
    out: Path | None,
    where: ExecutorArguments,
    as_json: bool,
    typed: str,
) -> None:
    """Diagnose a problem within a budget such as 20m, and print the verdicts; `typed` is what to type to continue."""
    seconds, console = seconds_from(budget), stderr()
    with stdout_for_json(as_json):
        recipe = load_recipe(problem, overrides)
        folder = out or Path("runs") / f"diagnose-{name_of(problem)}-{recipe.problem.target}"
        executor = where.options(recipe.source.get("execution")) or LocalOptions(where.workers or 2)
        interrupts = interruptible(console, lambda: _how_to_go_on(folder, typed))
        with interrupts, readable_warnings(console), watching(console, ComparisonView(executor.workers)) as show:
            diagnosis = diagnose(
                recipe,
                folder,
                budget=seconds,
                executor=executor,
                on_event=show,
                say=lambda text: say(console, text),
                command=command(typed),
            )
    if as_json:
        print_json({"folder": str(folder), **diagnosis.to_json()})
        return
    show_tables(stdout(), [verdict_table(diagnosis)])
    say(stdout(), f"\nwritten to {folder / 'diagnosis.json'}")
    say(stdout(), f"`{command(f'report {shlex.quote(str(folder))}')}` writes a page with figures.")


def _how_to_go_on(folder: Path, typed: str) -> str | None:
    if not folder.is_dir():
        return None
    return f"interrupted. What has ended is kept; continue with: {command(typed)}"
