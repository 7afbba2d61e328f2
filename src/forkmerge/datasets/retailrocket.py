"""RetailRocket: what users of a shop viewed, put in the cart and bought; a small counterpart of CTR and CTCVR.

Read from `retailrocket.npz` with the arrays `user`, `item`, `timestamp`, `view`, `cart`, `buy`, `split_time` (0
training, 1 validation, 2 test), `n_users` and `n_items`. The log holds no impressions without a reaction, so for each
row some items are drawn that the user is not known to have touched, at the same time.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets._clicks import click_evaluations, click_rows, click_stream, draw_others
from forkmerge.datasets._files import Pack, Root, check_columns, data_folder
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import ESMM
from forkmerge.problem.definition import Problem

TASKS = ("view", "cart", "buy")
FILE = "retailrocket.npz"
SOURCE = "the RetailRocket data (Kaggle, or SSLRec), packed as forkmerge.datasets.retailrocket says"
_HOUR, _DAY = 3600, 86_400


def recipe(
    target: str = "buy",
    steps: int = 1000,
    interval: int = 250,
    width: int = 16,
    seed: int = 0,
    root: str | None = None,
) -> Recipe:
    """Return a shared embedding with a small tower per task, and one branch per other task.

    Args:
        target: view, cart or buy.
        steps: Training steps.
        interval: Steps between merges.
        width: Features per field.
        seed: Draws the items without a reaction, the first weights and the order of the data.
        root: The folder; by default the one that FORKMERGE_DATA names.
    """
    pack = Pack(data_folder(root, "RetailRocket") / FILE, SOURCE)
    sizes = [int(pack["n_users"]), int(pack["n_items"]), 24, 7]
    return Recipe(
        problem(target, root, seed=seed),
        model=partial(ESMM, sizes, 0, TASKS, width=width, hidden=(64, 32)),
        optimizer=OptimizerOf("Adam", lr=1e-3),
        steps=steps,
        algorithm=ForkMerge("per_auxiliary", interval=interval),
        options={"seed": seed},
    )


def problem(
    target: str = "buy", root: Root = None, *, others: int = 4, seed: int = 0, batch_size: int = 512
) -> Problem:
    """Return three tasks on the same rows: user, item, hour and weekday.

    Args:
        target: view, cart or buy.
        root: The folder; by default the one that FORKMERGE_DATA names.
        others: Items without a reaction, drawn for each row.
        seed: Draws them.
        batch_size: Rows per step.
    """
    pack = Pack(data_folder(root, "RetailRocket") / FILE, SOURCE)
    items = int(pack["n_items"])
    sizes = {"user": int(pack["n_users"]), "item": items, **dict.fromkeys(TASKS, 2), "split_time": 3}
    rows = {name: pack.codes(name, size) for name, size in sizes.items()}
    rows["timestamp"] = pack["timestamp"].astype(np.int64)
    check_columns(pack, rows)
    pairs = rows["user"] * items + rows["item"]
    user, item = draw_others(rows["user"], pairs, items, others, "retailrocket", seed)
    time = np.concatenate([rows["timestamp"], np.repeat(rows["timestamp"], others)])
    codes = np.stack(
        [
            np.concatenate([rows["user"], user]),
            np.concatenate([rows["item"], item]),
            time // _HOUR % 24,
            time // _DAY % 7,
        ],
        axis=1,
    )
    labels = np.zeros((len(codes), len(TASKS)))
    labels[: len(pairs)] = np.stack([rows[task] for task in TASKS], axis=1)
    split = np.concatenate([rows["split_time"], np.repeat(rows["split_time"], others)])
    training, validation, test = (click_rows(codes[split == part], labels[split == part]) for part in range(3))
    return Problem(
        target,
        [click_stream(training, TASKS, batch_size)],
        validation=click_evaluations(validation, TASKS),
        test=click_evaluations(test, TASKS),
    )
