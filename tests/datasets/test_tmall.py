"""Tmall: what came last is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forkmerge.datasets import tmall
from small_packs import assert_recipe_trains, write_tmall


def test_tmall_holds_out_what_came_last(folder: Path) -> None:
    write_tmall(folder)
    problem = tmall.problem(others=1)
    with np.load(folder / tmall.FILE) as arrays:
        last = np.argsort(arrays["cart_timestamp"])[-8:]
        pairs = np.stack([arrays["cart_user"], arrays["cart_item"]], 1)[last]
        bought = np.stack([arrays["test_buy_user"], arrays["test_buy_item"]], 1)
    codes, _, labels = problem.evaluations("test")["cart"].dataset.tensors
    assert np.array_equal(codes[:8], pairs)
    assert labels[:, 0].tolist() == [1.0] * 8 + [0.0] * 8
    assert np.array_equal(problem.evaluations("test")["buy"].dataset.tensors[0][:20], bought)
    sizes = [len(problem.stream_map["buy"].dataset), len(problem.target_validation.dataset)]
    assert sizes == [2 * 180, 2 * 20]


def test_the_recipe_trains_and_any_task_can_be_the_target(folder: Path) -> None:
    assert_recipe_trains("tmall", folder)
