"""Views from Taskonomy: what is unknown stays unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import forkmerge as fm
from forkmerge.datasets import taskonomy
from small_packs import assert_recipe_trains, write_taskonomy


def test_unknown_pixels_stay_unknown(folder: Path) -> None:
    write_taskonomy(folder)
    images, labels, depths, normals = taskonomy.problem().target_validation.dataset.tensors
    assert images.shape == (3, 3, 64, 64)
    assert labels.min() == -1
    assert labels.max() == 8
    assert not depths[..., :5].any()
    assert depths[..., 5:].min() >= 0
    assert not normals[:, :, :4].any()
    assert torch.allclose(normals[:, :, 4:].norm(dim=1), torch.ones(3, 60, 64), atol=0.02)


def test_other_labels_can_be_segmented(folder: Path) -> None:
    write_taskonomy(folder)
    recipe = taskonomy.recipe(labels="semseg")
    assert recipe.model().heads["segmentation"](torch.zeros(2, 64, 8, 8), (64, 64)).shape == (2, 17, 64, 64)
    with pytest.raises(fm.ProblemError, match="'surfseg' or 'semseg'"):
        taskonomy.problem(labels="objects")  # type: ignore[arg-type]


def test_the_recipe_trains_and_any_task_can_be_the_target(folder: Path) -> None:
    assert_recipe_trains("taskonomy", folder)
