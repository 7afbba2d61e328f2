"""What the lower layers of a pre-trained network make of images, computed once and kept outside of the data."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from forkmerge.datasets import augment
from forkmerge.datasets._classify import IMAGENET_MEAN, IMAGENET_STD
from forkmerge.datasets._files import Array, Root
from forkmerge.datasets.images import Pixels, map_file
from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.convert_once import convert_once, key_of
from forkmerge.models import EfficientNetLite, imagenet_weights, load_published

_FORMAT = 1  # part of every key: another way of making features must not find the old files
_BATCH = 128


def encode_once(pixels: Pixels, source: Path, layer: int, *, cache: Root = None) -> Array:
    """Return a memory map of float16 values [n, 2, channels, height, width]: of every image and of its mirror image.

    Args:
        pixels: Images as uint8 values [n, 3, h, w].
        source: The file they come from.
        layer: How many layers of EfficientNet-Lite0 are below; `EfficientNetLite(first_layer=layer)` takes what they
            give.
        cache: The folder they are kept in; by default `forkmerge/images` in the user's cache folder.
    """
    weights = imagenet_weights()
    file = map_file(cache, key_of(f"features {_FORMAT}\n{pixels.shape}\n{layer}", [source, weights]))
    lower = EfficientNetLite()
    load_published(lower, weights)
    below = lower.below(layer).eval()
    return convert_once(file, partial(_open, count=len(pixels)), partial(_write, pixels=pixels, below=below))


def _open(file: Path, count: int) -> Array | None:
    try:
        features = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return features if features.dtype == np.float16 and features.ndim == 5 and len(features) == count else None


def _write(file: Path, pixels: Pixels, below: torch.nn.Module) -> None:
    from rich.console import Console
    from rich.progress import track

    def encode(part: slice) -> Array:
        images = augment.as_floats(torch.tensor(pixels[part]), IMAGENET_MEAN, IMAGENET_STD)
        views = torch.stack([below(images), below(images.flip(3))], 1)
        return np.asarray(views.half().numpy())

    with torch.no_grad():
        first = encode(slice(1))
        target = np.lib.format.open_memmap(file, "w+", np.float16, (len(pixels), *first.shape[1:]))
        starts, console = range(0, len(pixels), _BATCH), Console(stderr=True)
        for start in track(starts, "encoding images", console=console, transient=True, disable=not sys.stderr.isatty()):
            target[start : start + _BATCH] = encode(slice(start, start + _BATCH))
    target.flush()
    del target
    with file.open("rb+") as written:
        atomic_files.sync(written)


@dataclass(frozen=True)
class MirrorViews:
    """Features of images and of their mirror images: one of both is drawn in training."""

    def training(self, images: Tensor, generator: Generator) -> Tensor:
        """Return one view of every example."""
        drawn = torch.randint(2, (len(images),), generator=generator).to(images.device)
        return images[torch.arange(len(images), device=images.device), drawn].float()

    def evaluation(self, images: Tensor) -> Tensor:
        """Return the view that is not mirrored."""
        return images[:, 0].float()


def pretrained_encoder(first_layer: int) -> EfficientNetLite:
    """Return the layers above, with ImageNet weights."""
    encoder = EfficientNetLite(first_layer)
    load_published(encoder, imagenet_weights())
    return encoder
