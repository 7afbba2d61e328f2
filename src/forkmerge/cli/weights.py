"""The commands `forkmerge export` and `forkmerge merge`: weights to give away, and weights from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forkmerge.cli.options import Json, RunArgument
from forkmerge.errors import ConfigError


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    as_json: Json = False,
) -> None:
    """Write a run's model, for plain torch, with a card."""
    from forkmerge.cli.saved_runs import export_run_folder

    export_run_folder(run, out, as_json=as_json)


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
