"""Arguments and options that several commands have."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

WORDS = "forkmerge.words"
"""What was typed, in the context that all commands share."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
ProblemArgument = Annotated[str, typer.Argument(metavar="PROBLEM", help="A recipe: PROBLEM.toml or module:function.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
BranchWorkers = Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes that train branches.")]

RunWorkers = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Processes, of one thread each.  [default: 2]")
]
TrainsReference = Annotated[
    bool,
    typer.Option(
        "--reference/--no-reference",
        help="With ForkMerge, also train on the target alone: to say whether it helped, and to return that if it "
        "validates better.",
    ),
]
RecordsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE.json", help="Also keep the numbers of all runs in one file, made to be committed."),
]
EarlierRecords = Annotated[
    Path | None,
    typer.Option(
        "--earlier", metavar="FILE.json", help="Go on from these records in a new folder: what they have is not run."
    ),
]
EarlierComparisons = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="DIR", help="An earlier comparison to show together with this."),
]
EqualLabels = Annotated[
    bool | None,
    typer.Option(
        "--equal-labels/--no-equal-labels", help="In the end, train all methods on training and validation data."
    ),
]
ExecutorName = Annotated[
    str | None, typer.Option("--executor", metavar="NAME", help="Where: processes of this machine, or ray.")
]
ClusterAddress = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="The Ray cluster; auto finds it, local starts one."),
]


def settings_option(example: str) -> Any:
    """Return the option --set, with an example of its use."""
    return typer.Option("--set", metavar="KEY=VALUE", help=f"Any key of a recipe file, e.g. {example}.")


def typed_words(ctx: typer.Context) -> str:
    """Return the words behind `forkmerge`, for a shell."""
    return shlex.join(ctx.meta[WORDS])
