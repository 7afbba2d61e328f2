"""AliExpress: clicks (CTR) and purchases (CTCVR) in four countries, split 90/5/5 in time, as in the paper.

A country's rows are in the files `AliExpress_ES/train.csv` and `AliExpress_ES/test.csv`, one after the other in time,
or in one `AliExpress_ES.csv`; likewise for FR, NL and US. They are converted once to memory-mapped columns in the
cache folder, 286 bytes a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from torch.utils.data import Subset

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets._clicks import click_evaluations, click_stream
from forkmerge.datasets._files import Root, check_paper_count, data_folder, missing
from forkmerge.datasets._tables import MappedTable, Schema, open_table
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.errors import ProblemError, unknown_name
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import ESMM, MMoE
from forkmerge.problem.definition import Problem

SCHEMA = Schema(
    first=("search_id",),
    categorical=tuple(f"categorical_{number}" for number in range(1, 17)),
    numerical=tuple(f"numerical_{number}" for number in range(1, 64)),
    labels=("click", "conversion"),
)
# Impressions, clicks and purchases of the paper's table.
COUNTS = {
    "ES": (31_600_000, 841_000, 19_100),
    "FR": (27_400_000, 535_000, 14_400),
    "NL": (17_700_000, 382_000, 13_800),
    "US": (27_400_000, 450_000, 10_900),
}
# The table is rounded, and FR's click rate in it is 3% off its own clicks and impressions.
TOLERANCE = 0.05
SOURCE = "Tianchi (AliExpress Searching System), or in this form from the Multitask-Recommendation-Library"
BATCH, EPOCHS = 2048, 50


def tasks_of(country: str) -> tuple[str, str]:
    """Return the names of a country's tasks, such as ES_CTR and ES_CTCVR."""
    return f"{country}_CTR", f"{country}_CTCVR"


def steps_of(target: str) -> int:
    """Return the paper's 50 epochs of the target's country; others are read as often in them as their batches last.

    Example:
        >>> steps_of("ES_CTR"), steps_of("NL_CTR")
        (694300, 388900)
    """
    rows, *_ = COUNTS[target.partition("_")[0]]
    return EPOCHS * (rows * 90 // 100 // BATCH)


def recipe(
    target: str = "ES_CTR",
    countries: Sequence[str] = tuple(COUNTS),
    network: Literal["esmm", "mmoe"] = "esmm",
    steps: int | None = None,
    seed: int = 0,
    root: str | None = None,
    cache: str | None = None,
    check_counts: bool = True,
) -> Recipe:
    """Return the paper's setting: embedding 128, towers (512, 256), Adam 1e-3, weight decay 1e-6, pruned to 3 branches.

    Args:
        target: A task such as ES_CTR.
        countries: Whose data is read.
        network: ESMM's shared embedding with towers, or MMoE.
        steps: Training steps; by default the paper's 50 epochs, of the target's country.
        seed: Draws the first weights and the order of the data.
        root: The folder; by default the one that FORKMERGE_DATA names.
        cache: Where converted columns are kept.
        check_counts: Whether there must be about as many rows as in the paper.
    """
    tables = load(root, countries=countries, cache=cache, check_counts=check_counts)
    if network not in ("esmm", "mmoe"):
        raise ProblemError(f"network must be 'esmm' or 'mmoe', got {network!r}.")
    tasks = [task for country in tables for task in tasks_of(country)]
    kind = ESMM if network == "esmm" else MMoE
    problem = problem_of(tables, target)
    steps = steps_of(target) if steps is None else steps
    return Recipe(
        problem,
        model=partial(kind, field_sizes(tables.values()), len(SCHEMA.numerical), tasks),
        optimizer=OptimizerOf("Adam", lr=1e-3, weight_decay=1e-6),
        steps=steps,
        # The paper gives no Δt here.
        algorithm=ForkMerge.paper(mixtures="per_auxiliary", interval=max(1, steps // 10), prune_to=3),
        options={"seed": seed},
    )


def problem(
    target: str = "ES_CTR",
    root: Root = None,
    *,
    countries: Sequence[str] = tuple(COUNTS),
    cache: Root = None,
    check_counts: bool = True,
) -> Problem:
    """Return two tasks per country; those of a country share their rows (see `recipe` for the arguments)."""
    return problem_of(load(root, countries=countries, cache=cache, check_counts=check_counts), target)


def problem_of(tables: dict[str, MappedTable], target: str) -> Problem:
    """Return the problem on tables of countries: the first 90% of rows to train on, then 5% each to hold out."""
    streams, validation, test = {}, {}, {}
    for country, table in tables.items():
        first, second = len(table) * 90 // 100, len(table) * 95 // 100
        names = tasks_of(country)
        streams[country] = click_stream(Subset(table, range(first)), names, BATCH)
        validation.update(click_evaluations(Subset(table, range(first, second)), names))
        test.update(click_evaluations(Subset(table, range(second, len(table))), names))
    return Problem(target, streams, validation, test)


def field_sizes(tables: Iterable[MappedTable]) -> list[int]:
    """Return how many categories every field has: one more than the largest code in any country.

    MTReclib, which the paper builds on, counts them in the training file of one country.
    """
    return [max(codes) + 1 for codes in zip(*(table.largest for table in tables), strict=True)]


def load(
    root: Root = None,
    *,
    countries: Sequence[str] = tuple(COUNTS),
    cache: Root = None,
    check_counts: bool = True,
    progress: bool = True,
) -> dict[str, MappedTable]:
    """Return the rows of every country, in time, converting files that have not been converted yet."""
    folder = data_folder(root, "AliExpress")
    tables = {}
    for country in countries:
        if country not in COUNTS:
            raise ProblemError(unknown_name("country", country, COUNTS))
        table = open_table(
            _files(folder, country), SCHEMA, Path(cache) if cache is not None else None, progress=progress
        )
        if check_counts:
            counts = (len(table), *table.positives)
            for what, number, expected in zip(("rows", "clicks", "purchases"), counts, COUNTS[country], strict=True):
                check_paper_count(f"AliExpress {country}, {what}", number, expected, TOLERANCE * expected)
        tables[country] = table
    return tables


def _files(folder: Path, country: str) -> list[Path]:
    parts = [folder / f"AliExpress_{country}" / name for name in ("train.csv", "test.csv")]
    whole = folder / f"AliExpress_{country}.csv"
    if whole.is_file():
        return [whole]
    absent = [f"{path.parent.name}/{path.name}" for path in parts if not path.is_file()]
    if absent:
        raise missing(f"AliExpress {country}", folder, absent, SOURCE)
    return parts
