"""Features of a pre-trained network's lower layers: made once, mirrored or not, and the same as the network's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forkmerge.datasets import _features, augment, pacs
from forkmerge.datasets._classify import IMAGENET_MEAN, IMAGENET_STD
from forkmerge.models import EfficientNetLite, imagenet_weights, load_published
from small_packs import write_pacs


def test_layers_above_train_on_features_that_the_layers_below_gave_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pacs(folder)
    recipe = pacs.recipe(size=32, first_layer=15, steps=2, interval=1, batch_size=4, cache=str(tmp_path / "cache"))
    features, _ = recipe.problem.stream_map["photo"].dataset.tensors
    assert features.dtype == torch.float16
    assert features.shape[1:] == (2, 192, 1, 1)

    images, _ = pacs.problem("photo", size=32, cache=str(tmp_path / "cache")).stream_map["photo"].dataset.tensors
    whole = EfficientNetLite().eval()
    load_published(whole, imagenet_weights())
    floats = augment.as_floats(images, IMAGENET_MEAN, IMAGENET_STD)
    with torch.no_grad():
        torch.testing.assert_close(whole.below(15)(floats).half(), features[:, 0], rtol=2e-2, atol=2e-2)
        upper = recipe.model().encoder.eval()
        torch.testing.assert_close(upper(features[:, 0].float()), whole(floats), rtol=5e-2, atol=5e-2)

    def not_again(*arguments: object, **options: object) -> None:
        raise AssertionError("what is kept was made again")

    monkeypatch.setattr(_features, "_write", not_again)
    assert recipe.fit().score >= 0
    again = pacs.problem("photo", size=32, first_layer=15, cache=str(tmp_path / "cache"))
    torch.testing.assert_close(again.stream_map["photo"].dataset.tensors[0], features)


def test_a_view_is_drawn_in_training_and_fixed_in_evaluation() -> None:
    views = torch.stack([torch.zeros(64, 1), torch.ones(64, 1)], 1).half()
    drawn = _features.MirrorViews().training(views, torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.float32
    assert 16 < drawn.sum() < 48
    assert _features.MirrorViews().evaluation(views).sum() == 0
