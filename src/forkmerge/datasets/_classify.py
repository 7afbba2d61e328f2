"""Image classification: how bytes become a network's input, the loss, the prediction, and a small network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from forkmerge.datasets import augment
from forkmerge.datasets._files import Array
from forkmerge.models import Classifier
from forkmerge.problem.definition import Context

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what torchvision's weights expect


class Preparation(Protocol):
    """From bytes [n, 3, h, w] to what a network sees."""

    def training(self, images: Tensor, generator: Generator) -> Tensor:
        """Return augmented images."""

    def evaluation(self, images: Tensor) -> Tensor:
        """Return images as they are measured."""


@dataclass(frozen=True)
class CropAndFlip:
    """Small images: moved by some pixels, mirrored.

    Args:
        mean: Of every channel.
        std: Of every channel.
        padding: Pixels an image is moved by, at most; 0 for none.
        fill: What is seen beyond its edges.
        flip: Whether half of the images are mirrored.
    """

    mean: float | tuple[float, ...] = 0.5
    std: float | tuple[float, ...] = 0.25
    padding: int = 4
    fill: Literal["zeros", "reflect"] = "reflect"
    flip: bool = True

    def training(self, images: Tensor, generator: Generator) -> Tensor:
        """Return augmented images; they are moved as bytes, a quarter of the memory."""
        if self.padding:
            images = augment.random_crop(images, generator, self.padding, self.fill)
        if self.flip:
            images = augment.random_flip(images, generator)
        return self.evaluation(images)

    def evaluation(self, images: Tensor) -> Tensor:
        """Return the images as floats."""
        return augment.as_floats(images, self.mean, self.std)


@dataclass(frozen=True)
class ResizedCropAndFlip:
    """Large images: a random rectangle brought to size × size and mirrored; the centre when measured.

    Args:
        size: Side of the network's input.
        mean: Of every channel; by default ImageNet's, which the authors' scripts take for every network. Weights of
            ViT-Base trained on ImageNet-21K were trained with 0.5 and 0.5 instead.
        std: Of every channel.
    """

    size: int = 224
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def training(self, images: Tensor, generator: Generator) -> Tensor:
        """Return augmented images."""
        floats = augment.as_floats(images, self.mean, self.std)
        return augment.random_flip(augment.random_resized_crop(floats, generator, self.size), generator)

    def evaluation(self, images: Tensor) -> Tensor:
        """Return the centres of the images."""
        return augment.as_floats(augment.centre_crop(images, self.size), self.mean, self.std)


@dataclass(frozen=True)
class ClassificationLosses:
    """The cross-entropy of the one task that a stream serves, on augmented images.

    Args:
        preparation: From bytes to the network's input.
    """

    preparation: Preparation

    def __call__(self, model: nn.Module, batch: Any, tasks: Sequence[str], context: Context) -> dict[str, Tensor]:
        """Return the loss of the tasks asked for."""
        images, classes = batch
        inputs = self.preparation.training(images, context.generator)
        return {task: functional.cross_entropy(model(inputs, task), classes) for task in tasks}


@dataclass(frozen=True)
class PredictClass:
    """Gives (logits, classes) of a task.

    Args:
        task: The task.
        preparation: From bytes to the network's input.
    """

    task: str
    preparation: Preparation

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits and classes of a batch."""
        images, classes = batch
        return model(self.preparation.evaluation(images), self.task), classes


def few_of_each(rows: Array, classes: Array, count: int, seed: int) -> Array:
    """Return that many rows of every class that the data has, drawn by the seed; all of a class that has fewer."""
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(np.concatenate([order[classes[order] == label][:count] for label in np.unique(classes)]))


class SmallConvNet(nn.Module):
    """Three convolutions with normalisation, each at half the size of the one before: for two cores.

    Args:
        width: Channels of the first; the others have two and four times as many.
        pool: Whether the last map is averaged to one vector; otherwise it is returned, an eighth of the input's size.

    Attributes:
        channels: Channels of what comes out.
    """

    def __init__(self, width: int = 16, *, pool: bool = True) -> None:
        super().__init__()
        self.channels, self.pool = 4 * width, pool
        inputs, layers = 3, list[nn.Module]()
        for outputs in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
            inputs = outputs
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return features [n, channels], or the map [n, channels, h/8, w/8]."""
        features: Tensor = self.layers(x)
        return torch.flatten(features.mean((2, 3)), 1) if self.pool else features


def small_classifier(classes: Mapping[str, int], *, width: int = 16, shared_head: bool = False) -> Classifier:
    """Return a small convolutional network with a head per task, or one for all."""
    return Classifier(SmallConvNet(width), classes, shared_head=shared_head)
