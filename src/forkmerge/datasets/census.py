"""Census income: who earns more than 50,000, was never married, or has a college degree; three tasks on the same rows.

Read from `census_income.npz` with the arrays `cat` [n, fields], `cat_cardinality`, `num` [n, numbers], `y` [n, tasks],
`task_names` and `split` (0 training, 1 validation, 2 test).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets._clicks import click_evaluations, click_rows, click_stream
from forkmerge.datasets._files import Array, Pack, Root, check_columns, data_folder
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import ESMM
from forkmerge.problem.definition import Problem

TASKS = ("income_gt_50k", "never_married", "college_or_more")
FILE = "census_income.npz"
SOURCE = "the census-income (KDD) data of the UCI repository, packed as forkmerge.datasets.census says"


def recipe(
    target: str = "income_gt_50k",
    steps: int = 1000,
    interval: int = 250,
    width: int = 8,
    batch_size: int = 256,
    seed: int = 0,
    root: str | None = None,
) -> Recipe:
    """Return a shared embedding with a small tower per task, and one branch per other task.

    Args:
        target: A task.
        steps: Training steps.
        interval: Steps between merges.
        width: Features per field.
        batch_size: Rows per step.
        seed: Draws the first weights and the order of the data.
        root: The folder; by default the one that FORKMERGE_DATA names.
    """
    pack = _pack(root)
    sizes = [int(size) for size in pack["cat_cardinality"]]
    return Recipe(
        problem(target, root, batch_size=batch_size),
        model=partial(ESMM, sizes, pack["num"].shape[1], TASKS, width=width, hidden=(64, 32)),
        optimizer=OptimizerOf("Adam", lr=1e-3),
        steps=steps,
        algorithm=ForkMerge("per_auxiliary", interval=interval),
        options={"seed": seed},
    )


def problem(target: str = "income_gt_50k", root: Root = None, *, batch_size: int = 256) -> Problem:
    """Return three tasks on the same rows, each measured by the area under the ROC curve."""
    pack = _pack(root)
    codes, labels, split = pack.codes("cat", pack["cat_cardinality"]), pack.codes("y", 2), pack.codes("split", 3)
    numbers = pack["num"]
    check_columns(pack, {"cat": codes, "num": numbers, "y": labels, "split": split})
    tasks = [str(name) for name in pack["task_names"]]
    scaled = standardised(numbers, split == 0)
    training, validation, test = (
        click_rows(codes[rows], labels[rows], scaled[rows]) for rows in (split == p for p in range(3))
    )
    return Problem(
        target,
        [click_stream(training, tasks, batch_size)],
        validation=click_evaluations(validation, tasks),
        test=click_evaluations(test, tasks),
    )


def standardised(numbers: Array, rows: Array) -> Array:
    """Return log(1 + x), shifted and scaled to mean 0 and variance 1 over the rows that the mask `rows` names."""
    logs = np.log1p(numbers.astype(np.float64))
    spread = logs[rows].std(0)
    # The spread of a constant column is 0 up to rounding.
    result: Array = (logs - logs[rows].mean(0)) / np.where(spread > 1e-9, spread, 1)
    return result


def _pack(root: Root) -> Pack:
    return Pack(data_folder(root, "Census income") / FILE, SOURCE)
