"""Census income: numbers standardised by training rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forkmerge.datasets import census
from small_packs import assert_recipe_trains


def test_numbers_are_standardised_by_training_rows_alone() -> None:
    numbers = np.array([[0.0, 5], [3, 5], [8, 5], [1e6, 5]])
    known = np.array([True, True, True, False])
    found = census.standardised(numbers, known)
    assert np.allclose(found[known].mean(0), 0)
    assert np.allclose(found[known].std(0), [1, 0])
    assert found[3, 0] > 10


def test_the_recipe_trains_and_any_task_can_be_the_target(folder: Path) -> None:
    assert_recipe_trains("census", folder)
