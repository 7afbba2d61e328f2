"""RetailRocket: every row in its time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forkmerge.datasets import retailrocket
from small_packs import assert_recipe_trains, write_retailrocket


def test_retailrocket_keeps_every_row_in_its_time(folder: Path) -> None:
    write_retailrocket(folder)
    problem = retailrocket.problem(others=2)
    (stream,) = problem.stream_map.values()
    with np.load(folder / retailrocket.FILE) as arrays:
        chosen = arrays["split_time"] == 0
        time = arrays["timestamp"][chosen].astype(np.int64)
        wanted = np.stack([arrays["user"][chosen], arrays["item"][chosen], time // 3600 % 24, time // 86400 % 7], 1)
        labels = np.stack([arrays[task][chosen] for task in retailrocket.TASKS], 1)
    codes, _, targets = stream.dataset.tensors
    assert np.array_equal(codes[:80], wanted)
    assert np.array_equal(targets[:80], labels)
    assert len(codes) == 240
    assert not targets[80:].any()


def test_the_recipe_trains_and_any_task_can_be_the_target(folder: Path) -> None:
    assert_recipe_trains("retailrocket", folder)
