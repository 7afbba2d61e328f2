"""Image classification: how bytes become a network's input, the loss, the prediction, and a small network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from forkmerge.datasets import augment
from forkmerge.datasets._classify import (
    ClassificationLosses,
    CropAndFlip,
    PredictClass,
    ResizedCropAndFlip,
    SmallConvNet,
    small_classifier,
)
from forkmerge.problem.definition import Context


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_small_images_are_moved_mirrored_and_normalised_in_training_and_only_normalised_when_measured(
    images: Tensor,
) -> None:
    preparation = CropAndFlip(mean=0.5, std=0.25, padding=2)
    torch.testing.assert_close(preparation.evaluation(images), (images / 255 - 0.5) / 0.25)
    moved = augment.random_flip(augment.random_crop(images, generator := draw(), 2, "reflect"), generator)
    assert torch.equal(preparation.training(images, draw()), preparation.evaluation(moved))
    still = CropAndFlip(padding=0, flip=False)
    assert torch.equal(still.training(images, draw()), still.evaluation(images))


def test_large_images_are_cut_to_size_at_random_in_training_and_in_the_middle_when_measured() -> None:
    images = torch.randint(0, 256, (4, 3, 12, 10), generator=draw(), dtype=torch.uint8)
    preparation = ResizedCropAndFlip(6)
    measured = preparation.evaluation(images)
    centre = images[:, :, 3:9, 2:8] / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preparation.mean, preparation.std))
    torch.testing.assert_close(measured, (centre - mean) / std)
    first, again, other = (preparation.training(images, draw(seed)) for seed in (0, 0, 1))
    assert first.shape == measured.shape
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Recorder(nn.Module):
    """Three logits per image, and the inputs it was given."""

    def forward(self, x: Tensor, task: str) -> Tensor:
        self.inputs, self.task = x, task
        return x.mean((2, 3))


def test_losses_see_augmented_images_and_predictions_plain_ones(images: Tensor) -> None:
    preparation, model, classes = CropAndFlip(padding=2), Recorder(), torch.arange(5) % 3
    context = Context(0, 7)
    losses = ClassificationLosses(preparation)(model, (images, classes), ["photo"], context)
    augmented = preparation.training(images, Context(0, 7).generator)
    assert torch.equal(model.inputs, augmented)
    torch.testing.assert_close(losses["photo"], cross_entropy(augmented.mean((2, 3)), classes))
    assert list(losses) == ["photo"]
    logits, targets = PredictClass("sketch", preparation)(model, (images, classes))
    assert torch.equal(logits, preparation.evaluation(images).mean((2, 3)))
    assert (targets is classes, model.task) == (True, "sketch")


def test_the_small_network_gives_a_vector_or_a_map_of_an_eighth_of_the_size() -> None:
    images = torch.zeros(2, 3, 16, 24)
    assert SmallConvNet(4)(images).shape == (2, 16)
    assert SmallConvNet(4, pool=False)(images).shape == (2, 16, 2, 3)
    for shared_head, heads in ((False, 2), (True, 1)):
        net = small_classifier({"a": 5, "b": 5}, width=4, shared_head=shared_head)
        assert len(net.heads) == heads
        assert net(images, "b").shape == (2, 5)
