"""The command `forkmerge mix`: which corpora to fine-tune a language model on, and how much of each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from forkmerge.cli.options import WORDS, Json, typed_words
from forkmerge.errors import ConfigError, command


def mix(
    ctx: typer.Context,
    corpora: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET --with A B …", help="Text files, JSON lines with “text”, or folders; NAME=PATH."
        ),
    ],
    model: Annotated[
        Path, typer.Option(metavar="DIR", help="A local transformers folder, causal or encoder, or a config.json.")
    ],
    others: Annotated[list[str] | None, typer.Option("--with", metavar="A B …", help="The other corpora.")] = None,
    validation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to validate on.  [default: a fifth of the target]")
    ] = None,
    test: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to test on.  [default: a fifth of the target]")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights, not only LoRA adapters.")] = False,
    rank: Annotated[int, typer.Option(min=1, metavar="N", help="Rank of the adapters.")] = 8,
    freeze_a: Annotated[
        bool, typer.Option("--freeze-a", help="Train one factor of the adapters: their merges are then exact.")
    ] = False,
    length: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a window.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Windows per step.")] = 8,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Training steps.")] = 400,
    interval: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Steps between merges.  [default: an eighth of the steps]")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(metavar="X", help="Learning rate.  [default: 2e-4 of adapters, 5e-5 with --full]")
    ] = None,
    id_key: Annotated[
        str | None,
        typer.Option("--id", metavar="KEY", help="Key of an id that translations share; file: the file's name."),
    ] = None,
    contamination: Annotated[
        str, typer.Option(metavar="drop|report", help="What to do with documents that give away held-out ones.")
    ] = "drop",
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Also train with equal weights and each corpus alone.")
    ] = True,
    refit: Annotated[bool, typer.Option("--refit", help="In the end, train on validation text, too.")] = False,
    base_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="What --model is on a hub, such as org/model, for the card.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions.")] = 1,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Processes, of one thread each.")] = 2,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder; one that exists is continued.  [default: in runs/]")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run and cost, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a language model on the mixture of corpora that helps a target most.

    Ends with the model, the mixture over time, what each corpus was worth, and what other training reached.
    Run it again to continue what was interrupted.
    """
    target, *further = corpora
    _check_order(ctx, target)
    names = ("validation", "test", "full", "rank", "length", "batch_size", "steps", "interval", "lr", "id_key")
    options = {name: ctx.params[name] for name in (*names, "contamination")}
    options |= {"baselines": baselines, "refit": refit, "seeds": seeds, "freeze_a": freeze_a or None}
    auxiliaries = [*(others or []), *further]
    folder = out or Path("runs") / f"mix-{Path(target.partition('=')[0]).name.partition('.')[0]}"
    _run(target, auxiliaries, model, options, folder, workers, base_model, dry_run, as_json, typed_words(ctx))


def _check_order(ctx: typer.Context, target: str) -> None:
    """Refuse another order, in which one of the other corpora would be taken for the target."""
    words = list(ctx.meta[WORDS])
    after = words[words.index("mix") + 1 :]
    if after[:1] != [target]:
        raise ConfigError(f"the target comes first: write {command('mix TARGET --with A B … --model DIR')}.")


def _run(
    target: str,
    auxiliaries: Sequence[str],
    model: Path,
    options: dict[str, Any],
    folder: Path,
    workers: int,
    base_model: str | None,
    dry_run: bool,
    as_json: bool,
    typed: str,
) -> None:
    from forkmerge.cli.compare import carry_out
    from forkmerge.cli.print_tables import show_tables
    from forkmerge.cli.terminal import print_json, say, stderr, stdout, stdout_for_json
    from forkmerge.engine.executors.executor_options import LocalOptions
    from forkmerge.experiments.cost_of_comparison import estimate_comparison
    from forkmerge.experiments.hf_export import check_base_model
    from forkmerge.experiments.mix import corpora_of_mix, facts_of_mix, plan_mix, read_mix
    from forkmerge.experiments.text_mixture import write_corpora_facts
    from forkmerge.report.comparison_tables import write_tables
    from forkmerge.report.cost_table import cost_table
    from forkmerge.report.mixture_tables import corpora_table, mixture_tables

    with stdout_for_json(as_json):
        check_base_model(base_model)
        plan = plan_mix(target, auxiliaries, model, **options)
        facts = facts_of_mix(plan)
        if not as_json:
            show_tables(stderr(), [corpora_table(facts)])
        if dry_run:
            cost = estimate_comparison(plan, workers)
        else:
            carry_out(plan, folder, executor=LocalOptions(workers), typed=typed)
            write_tables(folder)
            write_corpora_facts(folder, facts)
            result = read_mix(folder, base_model=base_model)
    if dry_run:
        print_json(cost) if as_json else show_tables(stdout(), [cost_table(cost)])
    elif as_json:
        print_json({**result.to_json(), "contamination": [asdict(each) for each in corpora_of_mix(plan).contamination]})
    else:
        show_tables(stdout(), mixture_tables(result))
        say(stdout(), f"\nmodel: {result.model} ({result.model_is}, seed 0), which transformers loads.")
        say(stdout(), f"`{command(f'report {shlex.quote(str(folder))}')}` writes a page with figures.")
