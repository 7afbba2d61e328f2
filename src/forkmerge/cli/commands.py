"""The command `forkmerge`: what can be typed, and the help; nothing heavy is imported before a command is called."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from forkmerge._version import __version__
from forkmerge.cli.mix import mix
from forkmerge.cli.options import (
    WORDS,
    BranchWorkers,
    ClusterAddress,
    EarlierComparisons,
    EarlierRecords,
    EqualLabels,
    ExecutorName,
    Json,
    ProblemArgument,
    RecordsFile,
    RunArgument,
    RunWorkers,
    TrainsReference,
    settings_option,
    typed_words,
)
from forkmerge.cli.terminal import say, stderr
from forkmerge.cli.weights import export, merge
from forkmerge.engine.executors.resources import is_out_of_memory, is_shortage, shortage
from forkmerge.errors import ForkMergeError, ResourceError, command, facts_of, shows_all_frames, user_traceback

_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with what was asked for, but the machine has run out


class _Commands(TyperGroup):
    """Turns errors raised on purpose into one line, and leaves our frames out of those of the user's own code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what was typed, for whoever has to say how to go on."""
        ctx.meta[WORDS] = tuple(args)
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ForkMergeError as error:
            say(stderr(), f"error: {error}", style="red")
            raise typer.Exit(_TRY_AGAIN if isinstance(error, ResourceError) else 2) from None
        except KeyboardInterrupt:
            say(stderr(), "interrupted before anything was written.", style="yellow")
            raise typer.Exit(128 + signal.SIGINT) from None
        except Exception as error:
            own = None if shows_all_frames() else user_traceback(error)
            if not shows_all_frames() and (is_out_of_memory(error) or (own is None and is_shortage(error))):
                facts = "; ".join(fact.removeprefix("forkmerge: ") for fact in facts_of(error))
                say(stderr(), f"error: {shortage('the command cannot go on', error)} {facts}".rstrip(), style="red")
                raise typer.Exit(_TRY_AGAIN) from None
            if own is None:
                raise  # ours, or all of it was asked for
            say(stderr(), own.rstrip())
            words = command(f"--debug {typed_words(ctx)}")
            say(stderr(), f"error: in code that is not forkmerge's; all frames: {words}", style="red")
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    help="Make a target task better with auxiliary tasks: fork, train, merge what helps, repeat.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # which would take [compare] in a help text for markup, and shows a type for every flag
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"forkmerge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show all frames of an error; so does FORKMERGE_DEBUG=1.")
    ] = False,
) -> None:
    if debug:
        os.environ["FORKMERGE_DEBUG"] = "1"  # worker processes look there, too


@app.command()
def demo(
    ctx: typer.Context,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions of every method.")] = 10,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Processes.")] = 2,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for figure and results.")] = None,
    as_json: Json = False,
) -> None:
    """Compare ForkMerge with other training, on real data, offline."""
    from forkmerge.cli.demo import run_demo

    raise typer.Exit(run_demo(seeds=seeds, workers=workers, out=out, as_json=as_json, typed=typed_words(ctx)))


@app.command()
def run(
    ctx: typer.Context,
    problem: ProblemArgument,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run.  [default: a new one in runs/]")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="ForkMerge, Joint, SingleTask, PostTrain, JointThenAlone or WeightGrid."),
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="TASK", help="The target task.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Training steps.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of all randomness.")] = None,
    workers: BranchWorkers = None,
    executor: ExecutorName = None,
    address: ClusterAddress = None,
    settings: Annotated[list[str] | None, settings_option("algorithm.interval=200")] = None,
    reference: TrainsReference = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do and cost, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Train on a problem."""
    from forkmerge.cli.arguments import overrides_from
    from forkmerge.cli.executor_arguments import ExecutorArguments
    from forkmerge.cli.run import show_run_cost, start_run

    options = {"target": target, "steps": steps, "seed": seed, "algorithm": algorithm and {"name": algorithm}}
    overrides = overrides_from(options, settings or [])
    where = ExecutorArguments(executor, address, workers)
    if dry_run:
        show_run_cost(problem, overrides, reference=reference, where=where, as_json=as_json)
    else:
        start_run(
            problem, overrides, reference=reference, out=out, where=where, as_json=as_json, typed=typed_words(ctx)
        )


@app.command()
def resume(
    run: RunArgument,
    workers: BranchWorkers = None,
    executor: ExecutorName = None,
    address: ClusterAddress = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run the code of a run that somebody else started.")] = False,
    as_json: Json = False,
) -> None:
    """Continue a run that was interrupted or killed, to the same bits."""
    from forkmerge.cli.executor_arguments import ExecutorArguments
    from forkmerge.cli.run import resume_run

    resume_run(run, where=ExecutorArguments(executor, address, workers), trust=trust, as_json=as_json)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to look.")] = Path("runs"), as_json: Json = False
) -> None:
    """List runs with their status and scores."""
    from forkmerge.cli.saved_runs import list_runs

    list_runs(folder, as_json=as_json)


@app.command()
def show(run: RunArgument, as_json: Json = False) -> None:
    """Show a run: scores, coefficients, task relevance, time, notes."""
    from forkmerge.cli.saved_runs import show_run_folder

    show_run_folder(run, as_json=as_json)


app.command()(export)
app.command()(merge)
app.command()(mix)


@app.command()
def new(path: Annotated[Path, typer.Argument(metavar="FILE", help="E.g. my_problem.py.")]) -> None:
    """Write a commented, runnable example to put your own data in."""
    from forkmerge.cli.new import write_example

    write_example(path)


@app.command()
def compare(
    ctx: typer.Context,
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
            help=f"Words of `{command('methods')}`, comma-separated, with options; paper: the paper's sixteen; all.  "
            "[default: paper]",
        ),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(metavar="TASK,…", help="Target tasks, comma-separated, or all.  [default: the recipe's own]"),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Repetitions: seeds 0, 1, ….  [default: 5]")
    ] = None,
    workers: RunWorkers = None,
    executor: ExecutorName = None,
    address: ClusterAddress = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the comparison; one that exists is continued.  [default: in runs/]"
        ),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,…", help="Choose on validation, per method: lr, interval or a method's option."
        ),
    ] = None,
    tune_seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Seeds that the choice is made with.  [default: 1]")
    ] = None,
    equal_labels: EqualLabels = None,
    equal_compute: Annotated[
        bool | None,
        typer.Option(
            "--equal-compute/--no-equal-compute", help="Add what the compute of ForkMerge would have bought otherwise."
        ),
    ] = None,
    settings: Annotated[list[str] | None, settings_option("steps=500")] = None,
    records: RecordsFile = None,
    earlier: EarlierRecords = None,
    others: EarlierComparisons = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run and cost, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Compare methods over targets and seeds: Δ_m, intervals, costs.

    A [compare] table in PROBLEM.toml gives these options other defaults.
    Run it again to continue what was interrupted, to try again what failed, or to add methods, targets and seeds.
    """
    from forkmerge.cli.compare import CompareCommand
    from forkmerge.cli.executor_arguments import ExecutorArguments

    changes = ("methods", "targets", "seeds", "tune", "tune_seeds", "equal_labels", "equal_compute", "settings")
    options = {name: ctx.params[name] for name in changes if ctx.params[name] not in (None, [], ())}
    where = ExecutorArguments(executor, address, workers)
    asked = CompareCommand(problem, options, where, out, records, as_json, typed_words(ctx), others or (), earlier)
    if Path(problem).is_dir() or problem.endswith(".json"):
        asked.show_earlier()
    elif dry_run:
        asked.show_cost()
    else:
        asked.run()


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="METHOD", help="Everything about one method.", show_default=False)
    ] = None,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a document.")] = False,
) -> None:
    """List the methods that can be compared, and what each one costs."""
    from forkmerge.cli.methods import list_methods, show_method

    if name is None or as_json:
        list_methods(as_json=as_json, markdown=markdown)
    else:
        show_method(name)


@app.command()
def diagnose(
    ctx: typer.Context,
    problem: ProblemArgument,
    target: Annotated[
        str | None, typer.Option(metavar="TASK", help="The target task.  [default: the recipe's own]")
    ] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time to spend, e.g. 90s, 20m or 1.5h.")] = "20m",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the diagnosis; one that exists is continued.  [default: in runs/]"),
    ] = None,
    workers: RunWorkers = None,
    executor: ExecutorName = None,
    address: ClusterAddress = None,
    settings: Annotated[list[str] | None, settings_option("steps=500")] = None,
    as_json: Json = False,
) -> None:
    """Say which auxiliary tasks help a target and which hurt, and why.

    Trains the target with each auxiliary at several weights, compares gradients and confidences, runs ForkMerge, and
    ends with a verdict per auxiliary. Run it again to continue what was interrupted.
    """
    from forkmerge.cli.arguments import overrides_from
    from forkmerge.cli.diagnose import diagnose_problem
    from forkmerge.cli.executor_arguments import ExecutorArguments

    overrides, where = overrides_from({"target": target}, settings or []), ExecutorArguments(executor, address, workers)
    diagnose_problem(problem, overrides, budget=budget, out=out, where=where, as_json=as_json, typed=typed_words(ctx))


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="The folder of a run, a comparison or a diagnosis; or a comparison's records."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The page; or, with --figure, fig.pdf, .svg or .png.  [default: report.html in DIR]"
        ),
    ] = None,
    figure: Annotated[
        str | None, typer.Option(metavar="NAME", help="Draw one figure for a paper instead of the page.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained page: verdicts, tables, figures."""
    from forkmerge.cli.report import write_page_or_figure

    write_page_or_figure(folder, out, figure, as_json=as_json)
