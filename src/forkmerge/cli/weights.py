"""The commands `forkmerge export` and `forkmerge merge`: weights to give away, and weights from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forkmerge.cli.options import Json, RunArgument
from forkmerge.errors import ConfigError, StoreError, unknown_name

if TYPE_CHECKING:
    from forkmerge.experiments.hf_export import TransformersFolder


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
    as_json: Json = False,
) -> None:
    """Write a run's model, for plain torch or for transformers, with a card."""
    from forkmerge.cli.saved_runs import export_run_folder

    if form not in ("torch", "hf"):
        raise ConfigError(unknown_name("format", form, ("torch", "hf")))
    export_run_folder(run, out, form=_pretrained(run, trust, as_json) if form == "hf" else None, as_json=as_json)


def _pretrained(folder: Path, trust: bool, as_json: bool) -> TransformersFolder:
    """Make the model of a run again, by its recipe."""
    from forkmerge.algorithms.fit import build_model
    from forkmerge.algorithms.saved_run import read_saved_run
    from forkmerge.cli.run import recipe_of_run
    from forkmerge.experiments.hf_export import TransformersFolder

    saved = read_saved_run(folder, needs_record=False)
    if not saved.source:
        raise StoreError(
            f"{folder} was started from Python, where its model can be made again: call "
            f"forkmerge.experiments.hf_export.export_pretrained({str(folder)!r}, OUT, model)."
        )
    recipe = recipe_of_run(saved, trust=trust, as_json=as_json, doing="write its model for transformers")
    return TransformersFolder(build_model(recipe.model, seed=0))


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
