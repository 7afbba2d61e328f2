"""The commands `forkmerge run` and `forkmerge resume`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from forkmerge.algorithms.events.run_progress import RunView
from forkmerge.algorithms.forkmerge import ForkMerge, SingleTask
from forkmerge.algorithms.measure_test_split import measure_test
from forkmerge.algorithms.resolved_config import is_own_run
from forkmerge.algorithms.run_record import Run
from forkmerge.algorithms.saved_run import SavedRun, read_saved_run
from forkmerge.cli.arguments import name_of, settings_of
from forkmerge.cli.executor_arguments import ExecutorArguments
from forkmerge.cli.print_run import show_cost, show_run
from forkmerge.cli.progress import watching
from forkmerge.cli.saved_runs import print_saved_run, show_warnings
from forkmerge.cli.terminal import (
    can_ask,
    interruptible,
    print_json,
    readable_warnings,
    say,
    stderr,
    stdout,
    stdout_for_json,
)
from forkmerge.errors import ForkMergeError, StoreError, command
from forkmerge.experiments.cost_of_run import estimate_run
from forkmerge.experiments.execution import execution_from, with_workers
from forkmerge.experiments.pretraining import pretrained
from forkmerge.experiments.recipe import Recipe, load_recipe, recipe_from
from forkmerge.experiments.verdict import give_verdict
from forkmerge.problem.held_out import hold_out_validation

# A fifth of a hundred examples shows only large differences; of fewer, the search needs every one.
_HELD_OUT, _ENOUGH_TO_HOLD_OUT = 0.2, 100


def show_run_cost(
    problem: str, overrides: Mapping[str, Any], *, reference: bool, where: ExecutorArguments, as_json: bool
) -> None:
    """Say what a run would do and cost."""
    with stdout_for_json(as_json):
        recipe = _placed(_load(problem, overrides, reference), where)
        cost = estimate_run(recipe, workers=where.workers)
    print_json(cost) if as_json else show_cost(stdout(), cost)


def start_run(
    problem: str,
    overrides: Mapping[str, Any],
    *,
    reference: bool,
    out: Path | None,
    where: ExecutorArguments,
    as_json: bool,
    typed: str,
) -> None:
    """Train on a problem; `typed` is what to type to do it again."""
    with stdout_for_json(as_json):
        recipe = _placed(_load(problem, overrides, reference), where)
    recipe = replace(
        recipe,
        source={
            **recipe.source,
            "command": command(typed),
            "workers": where.workers,
            "problem": problem,
            "typed": dict(overrides),
        },
    )
    _train(recipe, out or _free_folder(problem, recipe), workers=where.workers, resume=False, as_json=as_json)


def resume_run(folder: Path, *, where: ExecutorArguments, trust: bool, as_json: bool) -> None:
    """Continue a run; one that is finished is shown. The code of somebody else's is run only if it is trusted."""
    saved = read_saved_run(folder, needs_record=False)
    if saved.status == "finished":
        say(stderr(), f"{folder} is finished already.")
        _test_late(saved, trust, as_json)
        print_saved_run(read_saved_run(folder), as_json=as_json)
        return
    show_warnings(saved)
    if not saved.source:
        together = folder.resolve().parent.parent
        if (together / "plan.json").is_file():
            raise StoreError(f"{folder} is a run of what is compared in {together}: type that command again.")
        raise StoreError(f"{folder} was started from Python: continue it with {saved.how_to_resume}.")
    recipe = recipe_of_run(saved, trust=trust, as_json=as_json)
    workers = where.workers or saved.source.get("workers")
    _train(_placed(recipe, where), folder, workers=workers, resume=True, trust=trust, as_json=as_json)


def recipe_of_run(saved: SavedRun, *, trust: bool, as_json: bool, doing: str = "continue it") -> Recipe:
    """Return the recipe of a run, whose code is run; somebody else's only if it is trusted."""
    if not (trust or is_own_run(saved.config)):
        ask_to_run(saved, f"{saved.path} was not started by you on this machine", doing)
    with stdout_for_json(as_json):
        return _recipe_of(saved)


def ask_to_run(saved: SavedRun, why: str, doing: str) -> None:
    """Ask on a terminal whether to run code that may be somebody else's; elsewhere that needs an option."""
    text = f"{why}. To {doing} is to run {_code(saved)}"
    if not can_ask():
        raise StoreError(f"{text}: if you trust it, add --trust.")
    say(stderr(), f"{text}.", style="yellow")
    typer.confirm("Do you trust it?", abort=True, err=True)


def _code(saved: SavedRun) -> str:
    """Return in words which code a resume would run."""
    settings = saved.source.get("settings", {})
    tables = [settings, *(table for table in [settings.get("pretrain")] if isinstance(table, Mapping))]
    calls = [f"{table.get('recipe')} with the arguments {table.get('arguments', {})}" for table in tables]
    return f"{' and '.join(calls)}, from {', '.join(saved.source.get('folders', []))} or what is installed"


def _load(problem: str, overrides: Mapping[str, Any], reference: bool) -> Recipe:
    """Return a recipe; ForkMerge trains its reference, too, unless somebody has said whether it should.

    Without a test split, a share of many validation examples is kept from the search for the verdict.
    """
    recipe = load_recipe(problem, overrides)
    settings = recipe.source["settings"]
    options = settings.get("algorithm", {})
    if not reference or "floor" in options or not isinstance(recipe.algorithm, ForkMerge):
        return recipe
    settings = {**settings, "algorithm": {**options, "floor": True}}
    recipe = replace(recipe, algorithm=replace(recipe.algorithm, floor=True))
    target, count = recipe.problem.target, recipe.problem.target_validation.size
    if target not in recipe.problem.evaluations("test") and count >= _ENOUGH_TO_HOLD_OUT:
        settings["hold_out"] = _HELD_OUT
        recipe = replace(recipe, problem=hold_out_validation(recipe.problem, _HELD_OUT))
        held = recipe.problem.evaluations("test")[target].size
        say(
            stderr(),
            f"no test split: {held} of {count} validation examples are kept from the search, for the verdict; "
            "--no-reference searches with all.",
        )
    return replace(recipe, source={**recipe.source, "settings": settings})


def _placed(recipe: Recipe, where: ExecutorArguments) -> Recipe:
    """Return a recipe that is carried out where its file or the command says, which `forkmerge resume` will repeat."""
    table = where.table(recipe.source.get("execution"))
    if not table:
        return recipe
    return replace(recipe, source={**recipe.source, "execution": table}, executor=execution_from(table))


def _holds_out(recipe: Recipe) -> bool:
    return "hold_out" in recipe.source["settings"]


def _free_folder(problem: str, recipe: Recipe) -> Path:
    name = f"{name_of(problem)}-{type(recipe.algorithm).__name__.lower()}-seed{recipe.options.get('seed', 0)}"
    folder, count = Path("runs") / name, 1
    while folder.exists():
        count += 1
        folder = Path("runs") / f"{name}-{count}"
    return folder


def _recipe_of(saved: SavedRun) -> Recipe:
    recipe = recipe_from(saved.source)
    function, before, now = saved.source["settings"]["recipe"], saved.source.get("code"), recipe.source.get("code")
    if before != now:
        text = f"the file of {function} has changed since {saved.path} was started: the bits may differ"
        say(stderr(), f"warning: {text}.", style="yellow")
    return recipe


def _train(
    recipe: Recipe, folder: Path, *, workers: int | None, resume: bool, as_json: bool, trust: bool = False
) -> None:
    console, view = stderr(), RunView()
    executor = with_workers(recipe.executor, workers)
    options = {"executor": executor} if executor else {} if workers is None else {"workers": workers}
    interrupts = interruptible(console, lambda: _how_to_go_on(folder, view, trust))
    with stdout_for_json(as_json), interrupts, readable_warnings(console):
        with watching(console, view) as show:
            recipe = pretrained(recipe, show)
            finished = recipe.fit(folder=folder, resume=resume, on_event=show, progress=False, **options)
        measure_test(finished, recipe.problem, folder)
        give_verdict(finished, recipe.problem, folder, is_held_out=_holds_out(recipe))
    if as_json:
        print_json({"folder": str(folder), **finished.to_json()})
        return
    show_run(stdout(), finished)
    if not isinstance(recipe.algorithm, SingleTask):
        _show_certainty(recipe, finished)
    quoted = shlex.quote(str(folder))
    say(stdout(), f"\nkept in {folder}; `{command(f'export {quoted} OUT')}` writes the model.")
    say(stdout(), f"`{command(f'report {quoted}')}` writes a page with its figures.")


def _show_certainty(recipe: Recipe, run: Run) -> None:
    """Say what to type for more certainty than one seed gives, or for a verdict at all."""
    settings = recipe.source["settings"].get("algorithm", {})
    held_out = {name: value for name, value in recipe.source["settings"].items() if name == "hold_out"}
    words = ["compare", str(recipe.source.get("problem", "PROBLEM")), "--methods", "stl,recipe", "--seeds", "5"]
    more = command(shlex.join([*words, *settings_of({**recipe.source.get("typed", {}), **held_out})]))
    if run.verdict is not None:
        say(stdout(), f"more certainty: `{more}`.")
    elif not isinstance(recipe.algorithm, ForkMerge):
        say(stdout(), f"whether it helped was not measured: `{more}` says it.")
    elif run.reference is None and recipe.algorithm.floor:
        text = "whether it helped cannot be said: single-task training, to compare with, ended in numbers that are not"
        say(stdout(), f"{text} finite; lower the learning rate, or look at more seeds with `{more}`.")
    elif run.reference is None:
        how = "with --set algorithm.floor=true" if "floor" in settings else "without --no-reference"
        say(stdout(), f"whether it helped was not measured: {how} it is; or `{more}`.")
    else:
        say(
            stdout(),
            "whether it helped cannot be said without a test split, as the search has used all validation examples: "
            f"give Problem(test=…), keep a part of them from the search (--set hold_out=0.2), or `{more}`.",
        )


def _how_to_go_on(folder: Path, view: RunView, trust: bool) -> str | None:
    if not (folder / "config.json").exists():
        return None
    checkpoint = f"; the last checkpoint is at {view.checkpoint}." if view.checkpoint else "."
    words = f"resume {shlex.quote(str(folder))}{' --trust' * trust}"
    return f"interrupted{checkpoint} Continue with: {command(words)}"


def _test_late(saved: SavedRun, trust: bool, as_json: bool) -> None:
    """Measure the test split of a run that was killed between its end and that measurement."""
    if not saved.source or saved.run is None or saved.run.test is not None:
        return
    if not (trust or is_own_run(saved.config)):
        say(stderr(), f"its test split may be unread: to look, add --trust and run {_code(saved)}.", style="yellow")
        return
    try:
        with stdout_for_json(as_json), readable_warnings(stderr()):
            recipe = _recipe_of(saved)
            if recipe.problem.target in recipe.problem.evaluations("test"):
                finished = recipe.fit(folder=saved.path, resume=True, progress=False)
                measure_test(finished, recipe.problem, saved.path)
                give_verdict(finished, recipe.problem, saved.path, is_held_out=_holds_out(recipe))
    except ForkMergeError as error:
        say(stderr(), f"warning: the test split could not be measured: {error}", style="yellow")
