"""Views from Taskonomy: what is unknown stays unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import forkmerge as fm
from forkmerge.datasets import dense, taskonomy
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


def test_a_pretrained_encoder_trains_on_features_and_mirrors_what_is_known_with_them(
    folder: Path, tmp_path: Path
) -> None:
    write_taskonomy(folder)
    recipe = taskonomy.recipe("normal", first_layer=6, steps=2, interval=1, batch_size=2, cache=str(tmp_path / "cache"))
    stream = next(iter(recipe.problem.stream_map.values()))
    assert stream.dataset.tensors[0].shape == (3, 2, 40, 8, 8)
    assert recipe.model()(torch.zeros(2, 40, 8, 8))["normal"].shape == (2, 3, 64, 64)
    run = recipe.fit()
    test = recipe.problem.evaluations("test")["normal"]
    assert all(value == value for value in fm.measure(run.model, test).values())

    batch = tuple(column[:3] for column in stream.dataset.tensors)
    drawn = [dense._draw_view(batch, torch.Generator().manual_seed(seed)) for seed in range(8)]
    for features, labels, depths, normals in drawn:
        for index in range(3):
            view = int(torch.equal(features[index], batch[0][index, 1].float()))
            assert torch.equal(features[index], batch[0][index, view].float())
            assert torch.equal(labels[index], batch[1][index].flip(-1) if view else batch[1][index])
            assert torch.equal(depths[index], batch[2][index].flip(-1) if view else batch[2][index])
            sign = -1 if view else 1
            first = batch[3][index, 0].flip(-1) if view else batch[3][index, 0]
            assert torch.equal(normals[index, 0], sign * first)
    assert any(torch.equal(d[0][0], batch[0][0, 1].float()) for d in drawn)
    assert any(torch.equal(d[0][0], batch[0][0, 0].float()) for d in drawn)
