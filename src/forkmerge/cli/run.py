"""The command `forkmerge`."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from forkmerge._version import __version__
from forkmerge.algorithms.composed import Composed
from forkmerge.algorithms.export import export_run
from forkmerge.algorithms.measure_test_split import measure_test
from forkmerge.algorithms.saved_run import SavedRun, list_saved_runs, read_saved_run
from forkmerge.cli import compare, diagnose, report
from forkmerge.cli.print_run import runs_table, show_cost, show_run, show_saved_run
from forkmerge.cli.progress import watching
from forkmerge.cli.run_progress import RunView
from forkmerge.cli.terminal import interruptible, print_json, readable_warnings, say, stderr, stdout, stdout_for_json
from forkmerge.errors import ConfigError, ForkMergeError, StoreError, command
from forkmerge.experiments.cost_of_run import estimate_run
from forkmerge.experiments.pretraining import pretrained
from forkmerge.experiments.recipe import Recipe, load_recipe, recipe_from
from forkmerge.methods.option_syntax import option_from, split_assignment


class _Commands(TyperGroup):
    """Turns errors raised on purpose into one line; all others keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ForkMergeError as error:
            say(stderr(), f"error: {error}", style="red")
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Make a target task better with auxiliary tasks: fork, train, merge what helps, repeat.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes that train branches.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forkmerge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions of every method.")] = 10,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Folder for figure and results.")] = None,
    as_json: Json = False,
) -> None:
    """Compare ForkMerge with other training, on real data, offline."""
    from forkmerge.cli.demo import run_demo

    raise typer.Exit(run_demo(seeds=seeds, workers=workers, out=out, as_json=as_json))


@app.command()
def run(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="A recipe: PROBLEM.toml or module:function.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run.  [default: a new one in runs/]")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="ForkMerge, Joint, SingleTask, PostTrain or WeightGrid.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="The target task.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all randomness.")] = None,
    workers: Workers = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of a recipe file, e.g. algorithm.interval=200."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do and cost, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Train on a problem."""
    with stdout_for_json(as_json):
        given = {"target": target, "steps": steps, "seed": seed, "algorithm": algorithm and {"name": algorithm}}
        recipe = load_recipe(problem, overrides_from({k: v for k, v in given.items() if v is not None}, settings or []))
        plan = estimate_run(recipe, workers=workers) if dry_run else None
    if plan is not None:
        print_json(asdict(plan)) if as_json else show_cost(stdout(), plan)
        return
    folder = out or _free_folder(problem, recipe)
    command = shlex.join(["forkmerge", *sys.argv[1:]])
    recipe = replace(recipe, source={**recipe.source, "command": command, "workers": workers})
    _train(recipe, folder, workers=workers, resume=False, as_json=as_json)


@app.command()
def resume(run: RunArgument, workers: Workers = None, as_json: Json = False) -> None:
    """Continue a run that was interrupted or killed, to the same bits."""
    story = read_saved_run(run)
    if story.status == "finished":
        say(stderr(), f"{run} is finished already.")
        _test_late(story, as_json)
        _show(read_saved_run(run), as_json)
        return
    if not story.source:
        raise StoreError(f"{run} was started from Python: continue it with {story.how_to_resume}.")
    with stdout_for_json(as_json):
        recipe = _recipe_of(story)
    _train(recipe, run, workers=workers or story.source.get("workers"), resume=True, as_json=as_json)


@app.command("runs")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to look.")] = Path("runs"), as_json: Json = False
) -> None:
    """List runs with their status and scores."""
    if not folder.is_dir() and folder != Path("runs"):
        raise StoreError(f"{folder} is not a folder.")
    rows = list_saved_runs(folder)
    if as_json:
        print_json(rows)
    elif rows:
        stdout().print(runs_table(rows))
    else:
        say(stdout(), f"no runs in {folder}: start one with `{command('run PROBLEM')}`.")


@app.command()
def show(run: RunArgument, as_json: Json = False) -> None:
    """Show a run: scores, coefficients, task relevance, time, notes."""
    _show(read_saved_run(run, verify=True), as_json)


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    as_json: Json = False,
) -> None:
    """Write a run's model, for plain torch, with a card."""
    export_run(run, out)
    files = [str(out / name) for name in ("model.safetensors", "README.md", "card.json")]
    print_json({"files": files}) if as_json else say(stdout(), "\n".join(files))


@app.command()
def new(path: Annotated[Path, typer.Argument(metavar="FILE", help="E.g. my_problem.py.")]) -> None:
    """Write a commented, runnable example to put your own data in."""
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigError(f"{path} must be importable: give a name such as my_problem.py.")
    text = resources.files("forkmerge").joinpath("cli/templates/my_problem.py").read_text("utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("my_problem", path.stem))
    except FileExistsError:
        raise StoreError(f"{path} exists: choose another name, or delete it first.") from None
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}.") from None
    place = "" if path.parent == Path() else f"cd {shlex.quote(str(path.parent))} && "
    say(stdout(), f"wrote {path}. It runs as it stands:\n\n    {place}{command(f'run {path.stem}:recipe')}")


def overrides_from(given: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Return the keys of a recipe that options set by name, and `--set key=value` by dotted key."""
    overrides = dict(given)
    for assignment in assignments:
        key, text = split_assignment(assignment)
        *tables, last = (part.strip() for part in key.split("."))
        if not last or not all(tables):
            raise ConfigError(f"--set {assignment}: write key=value, e.g. --set algorithm.interval=200.")
        place = overrides
        for table in tables:
            place[table] = place = dict(place[table]) if isinstance(place.get(table), dict) else {}
        place[last] = option_from(f"--set {key}", text)
    return overrides


def _free_folder(problem: str, recipe: Recipe) -> Path:
    module, _, function = problem.partition(":")
    stem = Path(problem).stem if problem.endswith(".toml") else module.rsplit(".", 1)[-1]
    parts = [stem, *([function] if function not in ("", "recipe") else [])]
    name = "-".join([*parts, type(recipe.algorithm).__name__.lower(), f"seed{recipe.options.get('seed', 0)}"])
    folder, count = Path("runs") / name, 1
    while folder.exists():
        count += 1
        folder = Path("runs") / f"{name}-{count}"
    return folder


def _recipe_of(story: SavedRun) -> Recipe:
    recipe = recipe_from(story.source)
    function, before, now = story.source["settings"]["recipe"], story.source.get("code"), recipe.source.get("code")
    if before != now:
        text = f"the file of {function} has changed since {story.path} was started: the bits may differ"
        say(stderr(), f"warning: {text}.", style="yellow")
    return recipe


def _view(recipe: Recipe) -> RunView:
    steps, algorithm = recipe.steps, recipe.algorithm
    settings = algorithm.settings(recipe.problem)
    if not isinstance(steps, int) or steps < 1:  # `fit` refuses it in its own words
        return RunView(0, 1, refit=False)
    total = algorithm.branch_steps(recipe.problem, steps) if isinstance(algorithm, Composed) else 0
    return RunView(steps, math.ceil(steps / settings.interval_of(steps)), refit=settings.refit, total=total)


def _train(recipe: Recipe, folder: Path, *, workers: int | None, resume: bool, as_json: bool) -> None:
    console, view = stderr(), _view(recipe)
    options = {} if workers is None else {"workers": workers}
    interrupts = interruptible(console, lambda: _how_to_go_on(folder, view))
    with stdout_for_json(as_json), interrupts, readable_warnings(console):
        with watching(console, view) as observe:
            recipe = pretrained(recipe, observe)
            finished = recipe.fit(folder=folder, resume=resume, observe=observe, **options)
        measure_test(finished, recipe.problem, folder)
    if as_json:
        print_json({"folder": str(folder), **finished.to_json()})
        return
    show_run(stdout(), finished)
    place = shlex.quote(str(folder))
    say(stdout(), f"\nkept in {folder}; `{command(f'export {place} OUT')}` writes the model.")
    say(stdout(), f"`{command(f'report {place}')}` writes a page with its figures.")


def _how_to_go_on(folder: Path, view: RunView) -> str | None:
    if not (folder / "config.json").exists():
        return None
    place = f"; the last checkpoint is at {view.checkpoint}." if view.checkpoint else "."
    return f"interrupted{place} Continue with: {command(f'resume {shlex.quote(str(folder))}')}"


def _test_late(story: SavedRun, as_json: bool) -> None:
    """Measure the test split of a run that was killed between its end and that measurement."""
    if not story.source or story.run is None or story.run.test is not None:
        return
    try:
        with stdout_for_json(as_json), readable_warnings(stderr()):
            recipe = _recipe_of(story)
            if recipe.problem.target in recipe.problem.evaluations("test"):
                measure_test(recipe.fit(folder=story.path, resume=True), recipe.problem, story.path)
    except ForkMergeError as error:
        say(stderr(), f"warning: the test split could not be measured: {error}", style="yellow")


def _show(story: SavedRun, as_json: bool) -> None:
    for warning in story.warnings:
        say(stderr(), f"warning: {warning}", style="yellow")
    if as_json:
        print_json({**story.to_row(), "run": None if story.run is None else story.run.to_json()})
    elif story.run is not None:
        show_run(stdout(), story.run)
    else:
        show_saved_run(stdout(), story)


compare.register(app)
diagnose.register(app)
report.register(app)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
