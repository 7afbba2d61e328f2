"""Ready problems on the real files, where FORKMERGE_DATA names their folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from forkmerge.datasets import cifar10, svhn
from small_packs import WRITERS

REAL = os.environ.get("FORKMERGE_DATA", "")


@pytest.mark.skipif(not REAL, reason="FORKMERGE_DATA names no folder")
class TestRealData:
    @pytest.mark.parametrize("name", WRITERS)
    def test_every_small_problem_trains_a_step(self, name: str) -> None:
        module, _ = WRITERS[name]
        if not (Path(REAL) / module.FILE).is_file():
            pytest.skip(f"{module.FILE} is not in FORKMERGE_DATA")
        recipe = module.recipe(steps=1, interval=1)
        fm.SingleTask().fit(recipe.problem, model=recipe.model, optimizer=recipe.optimizer, steps=1)

    @pytest.mark.parametrize(("module", "unlabelled"), [(cifar10, 41_000), (svhn, 64_931)])
    def test_the_semi_supervised_splits_have_the_papers_counts(self, module: Any, unlabelled: int) -> None:
        parts = module.splits()
        assert len(parts.labelled) == module.LABELS
        assert len(parts.unlabelled) == unlabelled
        assert len(parts.validation) == module.VALIDATION
        assert len(parts.test) == module.TEST
