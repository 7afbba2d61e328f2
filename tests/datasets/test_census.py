"""Census income: numbers standardised by training rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forkmerge.datasets import census
from small_packs import assert_recipe_trains


def test_numbers_are_standardised_by_training_rows_alone() -> None:
    numbers = np.array([[0.0, 5], [3, 5], [8, 5], [1e6, 5]])
    training = np.array([True, True, True, False])
    scaled = census.standardised(numbers, training)
    assert np.allclose(scaled[training].mean(0), 0)
    assert np.allclose(scaled[training].std(0), [1, 0])
    assert scaled[3, 0] > 10


def test_the_recipe_trains_and_any_task_can_be_the_target(folder: Path) -> None:
    assert_recipe_trains("census", folder)
