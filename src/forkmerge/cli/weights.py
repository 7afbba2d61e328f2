"""The commands `forkmerge export` and `forkmerge merge`: weights to give away, and weights from elsewhere."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from forkmerge.cli.options import Json, RunArgument
from forkmerge.errors import ConfigError, StoreError, unknown_name

if TYPE_CHECKING:
    from forkmerge.experiments.hf_export import TransformersFolder
    from forkmerge.experiments.run_results import RunResult


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    form: Annotated[
        str,
        typer.Option("--format", metavar="NAME", help="torch, or hf: the files of save_pretrained, for transformers."),
    ] = "torch",
    trust: Annotated[
        bool, typer.Option("--trust", help="With hf, run the code of a run that somebody else started.")
    ] = False,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With hf, what it was made from, for the card: its name on a hub."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's model, for plain torch or for transformers, with a card."""
    from forkmerge.cli.saved_runs import export_run_folder

    if form not in ("torch", "hf"):
        raise ConfigError(unknown_name("format", form, ("torch", "hf")))
    if base_model is not None and form != "hf":
        raise ConfigError("--base-model stands in the card that hubs read: add --format hf.")
    try:
        member = _member_of(run)
    except StoreError:
        if form == "hf":
            raise
        member = None  # weights can be had of a damaged comparison, too
    made = _pretrained(run, member, base_model, trust, as_json) if form == "hf" else None
    export_run_folder(run, out, form=made, typed=None if member is None else member.typed, as_json=as_json)


class _Member(NamedTuple):
    """A run of a comparison: what is compared, the run's record, whether it is of a mixture, and what was typed."""

    plan: dict[str, Any]
    record: RunResult
    is_mix: bool
    typed: str


def _member_of(run: Path) -> _Member | None:
    """Return which run of a comparison a folder is; None where it is a run of its own."""
    from forkmerge.engine.storage.json_files import interpreting
    from forkmerge.experiments.mixture_model import RECIPE
    from forkmerge.experiments.run_results import read_plan, read_run_result

    path = run.resolve()
    folder = path.parent.parent
    names = (f"{path.parent.name}/{path.name}{end}.json" for end in ("", "-tuning"))
    file = next((name for name in names if (folder / name).is_file()), None)
    if file is None or (plan := read_plan(folder)) is None or (record := read_run_result(folder, file)) is None:
        return None
    with interpreting(folder / "plan.json", "the plan of a comparison"):
        return _Member(plan, record, plan["settings"]["recipe"] == RECIPE, _typed(plan, record))


def _typed(plan: Mapping[str, Any], record: RunResult) -> str:
    """Return the command that does a run of a comparison again, for a card."""
    from forkmerge.cli.arguments import settings_of
    from forkmerge.experiments.mixture_model import RECIPE, command_of_mix
    from forkmerge.methods.option_syntax import show_options

    if plan["settings"]["recipe"] == RECIPE:
        return command_of_mix(plan)
    settings = {name: value for name, value in plan["settings"].items() if name != "recipe"}
    words = ["forkmerge", "compare", plan["settings"]["recipe"], *settings_of({**settings, "target": record.target})]
    words += ["--methods", record.method, "--seeds", str(record.seed + 1)]
    for name, value in record.setting.items():
        words += ["--tune", show_options({name: value})[1:-1]]
    return shlex.join([*words, *(["--equal-labels"] if plan["equal_labels"] and record.kind == "final" else [])])


def _pretrained(
    folder: Path, member: _Member | None, base_model: str | None, trust: bool, as_json: bool
) -> TransformersFolder:
    """Make the model of a run again, by its recipe, or by that of the comparison that it is in."""
    from forkmerge.algorithms.fit import build_model
    from forkmerge.algorithms.saved_run import read_saved_run
    from forkmerge.cli.run import ask_to_run, recipe_of_run
    from forkmerge.cli.terminal import stdout_for_json
    from forkmerge.experiments.hf_export import TransformersFolder
    from forkmerge.experiments.mixture_model import form_of_mix
    from forkmerge.experiments.recipe import seeded_recipe

    saved, doing = read_saved_run(folder, needs_record=False), "write its model for transformers"
    if member is None and not saved.source:
        raise StoreError(
            f"{folder} was started from Python, where its model can be made again: call "
            f"forkmerge.experiments.hf_export.export_pretrained({str(folder)!r}, OUT, model)."
        )
    if member is None or saved.source:
        recipe = recipe_of_run(saved, trust=trust, as_json=as_json, doing=doing)
        return TransformersFolder(build_model(recipe.model, seed=0), base_model)
    if member.is_mix:  # which only reads
        return form_of_mix(member.plan, base_model)
    source = {key: member.plan.get(key) for key in ("settings", "pretrained")} | {"folders": [str(Path.cwd())]}
    if not trust:  # nobody has signed a plan
        why = f"{folder.parent.parent / 'plan.json'} says how its model is made, and may have been changed by anybody"
        ask_to_run(replace(saved, config={**saved.config, "source": source}), why, doing)
    with stdout_for_json(as_json):
        recipe = seeded_recipe(source, member.record.seed, member.record.target)
    return TransformersFolder(build_model(recipe.model, seed=0), base_model)


def merge(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B … OUT",
            help="Safetensors files, or folders of such as transformers writes them; and a new file or folder.",
        ),
    ],
    coefficients: Annotated[
        str, typer.Option(metavar="N,N,…", help="The share of each, in their order, e.g. 0.7,0.3.")
    ],
    as_json: Json = False,
) -> None:
    """Merge finished models on disk, of any size, with given coefficients."""
    *checkpoints, out = paths
    try:
        values = [float(word) for word in coefficients.split(",")]
    except ValueError:
        raise ConfigError(f"--coefficients {coefficients}: write numbers, e.g. --coefficients 0.7,0.3.") from None
    names = [str(path) for path in checkpoints]
    if not names or len(set(names)) != len(values):
        raise ConfigError(
            f"{len(values)} coefficients, but {len(set(names))} models to merge: type A B … OUT, OUT last."
        )
    from forkmerge.algorithms.own_loop.merge_files import merge_files
    from forkmerge.cli.terminal import print_json, say, stdout

    merge_files(dict(zip(names, checkpoints, strict=True)), out, coefficients=dict(zip(names, values, strict=True)))
    files = [str(path) for path in (sorted(out.iterdir()) if out.is_dir() else [out])]
    print_json({"files": files}) if as_json else say(stdout(), "\n".join(files))
