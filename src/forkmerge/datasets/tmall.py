"""Tmall: purchases, carts and favourites, each with users and items of its own; a small counterpart of CTR and CTCVR.

Read from `tmall.npz` with the arrays `buy_user`, `buy_item`, `buy_timestamp`, the same for `cart` and `fav`,
`test_buy_user`, `test_buy_item`, `n_users` and `n_items`. Only what users did is known, so items that they are not
known to have chosen are drawn for comparison. Of each task the last tenth in time is held out: of purchases all for
validation, since their test is given; of the others the first half for validation, the second for the test.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from torch.utils.data import TensorDataset

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets._clicks import click_evaluations, click_rows, click_stream, draw_others
from forkmerge.datasets._files import Array, Pack, Root, check_columns, data_folder
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import ESMM
from forkmerge.problem.definition import Problem

TASKS = {"buy": "buy", "cart": "cart", "favourite": "fav"}  # the name in the file
FILE = "tmall.npz"
SOURCE = "the Tmall data of SSLRec, packed as forkmerge.datasets.tmall says"


def recipe(
    target: str = "buy",
    steps: int = 1500,
    interval: int = 500,
    width: int = 16,
    seed: int = 0,
    root: str | None = None,
) -> Recipe:
    """Return a shared embedding with a small tower per task, and one branch per other task.

    Args:
        target: buy, cart or favourite.
        steps: Training steps.
        interval: Steps between merges.
        width: Features per field.
        seed: Draws the items without a reaction, the first weights and the order of the data.
        root: The folder; by default the one that FORKMERGE_DATA names.
    """
    pack = Pack(data_folder(root, "Tmall") / FILE, SOURCE)
    return Recipe(
        problem(target, root, seed=seed),
        model=partial(ESMM, [int(pack["n_users"]), int(pack["n_items"])], 0, list(TASKS), width=width, hidden=(64, 32)),
        optimizer=OptimizerOf("Adam", lr=1e-3),
        steps=steps,
        algorithm=ForkMerge("per_auxiliary", interval=interval),
        options={"seed": seed},
    )


def problem(
    target: str = "buy", root: Root = None, *, others: int = 4, seed: int = 0, batch_size: int = 512
) -> Problem:
    """Return three tasks, each with a stream of its own.

    Args:
        target: buy, cart or favourite.
        root: The folder; by default the one that FORKMERGE_DATA names.
        others: Items not chosen, drawn for each that was.
        seed: Draws them.
        batch_size: Rows per step and task.
    """
    pack = Pack(data_folder(root, "Tmall") / FILE, SOURCE)
    items = int(pack["n_items"])
    streams, validation, test = {}, {}, {}
    for task, name in TASKS.items():
        parts = _splits(pack, name)
        pairs = np.concatenate([part[:, 0] * items + part[:, 1] for part in parts])
        rows = [_rows(part, pairs, items, others, task, seed, index) for index, part in enumerate(parts)]
        streams[task] = click_stream(rows[0], [task], batch_size)
        validation.update(click_evaluations(rows[1], [task]))
        test.update(click_evaluations(rows[2], [task]))
    return Problem(target, streams, validation, test)


def _splits(pack: Pack, name: str) -> list[Array]:
    """Return the pairs of user and item to train, validate and test on, [n, 2] each."""
    sizes = {part: int(pack[f"n_{part}s"]) for part in ("user", "item")}
    columns = {part: pack.codes(f"{name}_{part}", size) for part, size in sizes.items()}
    columns["timestamp"] = pack[f"{name}_timestamp"].astype(np.int64)
    check_columns(pack, {f"{name}_{part}": column for part, column in columns.items()})
    order = np.argsort(columns["timestamp"], kind="stable")
    pairs = np.stack([columns["user"], columns["item"]], axis=1)[order]
    first, second = len(pairs) * 90 // 100, len(pairs) * 95 // 100
    if name != "buy":
        return [pairs[:first], pairs[first:second], pairs[second:]]
    test = [pack.codes(f"test_buy_{part}", size) for part, size in sizes.items()]
    check_columns(pack, {"test_buy_user": test[0], "test_buy_item": test[1]})
    return [pairs[:first], pairs[first:], np.stack(test, axis=1)]


def _rows(pairs: Array, chosen: Array, items: int, others: int, *seed: object) -> TensorDataset:
    user, item = draw_others(pairs[:, 0], chosen, items, others, "tmall", *seed)
    codes = np.concatenate([pairs, np.stack([user, item], axis=1)])
    labels = np.zeros((len(codes), 1))
    labels[: len(pairs)] = 1
    return click_rows(codes, labels)
