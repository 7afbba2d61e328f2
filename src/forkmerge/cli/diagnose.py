"""The command `forkmerge diagnose`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from forkmerge.cli.compare import Json, _show, _stem
from forkmerge.cli.comparison_progress import ComparisonView
from forkmerge.cli.progress import watching
from forkmerge.cli.terminal import interruptible, print_json, readable_warnings, say, stderr, stdout, stdout_for_json
from forkmerge.errors import command
from forkmerge.experiments.recipe import load_recipe


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command()(diagnose)


def diagnose(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="A recipe: PROBLEM.toml or module:function.")],
    target: Annotated[str | None, typer.Option(help="The target task.  [default: the recipe's own]")] = None,
    budget: Annotated[str, typer.Option(help="Time to spend, e.g. 90s, 20m or 1.5h.")] = "20m",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the diagnosis; one that exists is continued.  [default: in runs/]")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, of one thread each.")] = 2,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of a recipe file, e.g. steps=500.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which auxiliary tasks help a target and which hurt, and why.

    Trains the target with each auxiliary at several weights, compares gradients and confidences, runs ForkMerge, and
    ends with a verdict per auxiliary. Run it again to continue what was interrupted.
    """
    # Imported here: other commands need not wait for it.
    from forkmerge.analysis.diagnosis.budget import seconds_from
    from forkmerge.analysis.diagnosis.diagnosis import diagnose as run_diagnosis
    from forkmerge.cli.run import overrides_from
    from forkmerge.report.verdict_table import verdict_table

    seconds, console = seconds_from(budget), stderr()
    with stdout_for_json(as_json):
        given = {} if target is None else {"target": target}
        recipe = load_recipe(problem, overrides_from(given, settings or []))
        folder = out or Path("runs") / f"diagnose-{_stem(problem)}-{recipe.problem.target}"
        interrupts = interruptible(console, lambda: _how_to_go_on(folder))
        with interrupts, readable_warnings(console), watching(console, ComparisonView(workers)) as watch:
            found = run_diagnosis(
                recipe,
                folder,
                budget=seconds,
                workers=workers,
                watch=watch,
                say=lambda text: say(console, text),
                command=shlex.join(["forkmerge", *sys.argv[1:]]),
            )
    if as_json:
        print_json({"folder": str(folder), **found.to_json()})
        return
    _show([verdict_table(found)])
    say(stdout(), f"\nwritten to {folder / 'diagnosis.json'}")
    say(stdout(), f"`{command(f'report {shlex.quote(str(folder))}')}` writes a page with figures.")


def _how_to_go_on(folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    return f"interrupted. What has ended is kept; continue with: {command(shlex.join(sys.argv[1:]))}"
