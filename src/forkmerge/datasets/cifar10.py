"""CIFAR-10 with 4000 labels, 41000 images without, and 5000 to validate on, as in the paper.

Read from the binary version (`data_batch_1.bin`, …), the Python version (`data_batch_1`, …, through a reader that
admits arrays and runs no code), `train.pt` and `test.pt`, or the small pack `cifar10_jpeg.npz`, whichever is found
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from forkmerge.datasets import semi
from forkmerge.datasets._classify import CropAndFlip
from forkmerge.datasets._files import (
    Array,
    Pack,
    Root,
    check_codes,
    check_paper_count,
    data_folder,
    find,
    missing,
    require,
)
from forkmerge.datasets._packs import decode_pack
from forkmerge.datasets._pickles import read_arrays, read_tensors
from forkmerge.datasets.semi import Images, SemiSplits
from forkmerge.errors import ProblemError
from forkmerge.experiments.recipe import Recipe

CLASSES, SIDE = 10, 32
LABELS, VALIDATION, TRAINING, TEST = 4000, 5000, 50_000, 10_000
SOURCE = "the CIFAR-10 page of the University of Toronto (binary version)"
PREPARATION = CropAndFlip(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
# ε of VAT of Oliver et al., NeurIPS 2018. Theirs is for images after ZCA, with Gaussian noise on the input; ours have
# every channel scaled and no noise, so the same ε is another share of an image.
RADIUS = 6.0
_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
_ROW = 1 + 3 * SIDE * SIDE  # a class and three planes of a colour each


def recipe(
    network: semi.Network = "small",
    steps: int = 2000,
    seed: int = 0,
    labels: int | Literal["all"] = LABELS,
    validation: int = VALIDATION,
    root: str | None = None,
    cache: str | None = None,
) -> Recipe:
    """Return supervised training on the labelled images alone; `labels="all"` labels all.

    Args:
        network: A small convolutional network for two cores, or the paper's.
        steps: Training steps.
        seed: Draws the split, the network's first weights and the order of the data.
        labels: How many images have one.
        validation: Images to validate on.
        root: The folder; by default the one that FORKMERGE_DATA names.
        cache: Where decoded images are kept.
    """
    data = splits(root, labels=labels, validation=validation, seed=seed, cache=cache)
    return semi.supervised_recipe(data, network, steps, seed)


def semi_supervised(
    auxiliaries: Sequence[str] = semi.S4L,
    network: semi.Network = "wrn-28-2",
    width: int = 16,
    steps: int = semi.STEPS,
    batch_size: int = semi.BATCH,
    seed: int = 0,
    labels: int = LABELS,
    validation: int = VALIDATION,
    metric: str = "accuracy",
    root: str | None = None,
    cache: str | None = None,
    check_counts: bool = True,
) -> Recipe:
    """Return the paper's semi-supervised setting, see `semi.semi_supervised_recipe`.

    Args:
        auxiliaries: What is learnt from the images without labels: tasks of `datasets.unlabelled`.
        network: The paper's, or a small convolutional network for two cores.
        width: Channels of the small network's first layer.
        steps: Training steps.
        batch_size: Images per step and task.
        seed: Draws the split, the network's first weights, the order of the data and the augmentations.
        labels: How many images have one.
        validation: Images to validate on.
        metric: "accuracy", or "error" as in the paper's table.
        root: The folder; by default the one that FORKMERGE_DATA names.
        cache: Where decoded images are kept.
        check_counts: Whether there must be as many images as in the paper.
    """
    data = splits(root, labels=labels, validation=validation, seed=seed, check_counts=check_counts, cache=cache)
    return semi.semi_supervised_recipe(
        data, auxiliaries, network, steps, batch_size, seed, width=width, radius=RADIUS, metric=metric
    )


def splits(
    root: Root = None,
    *,
    labels: int | Literal["all"] = LABELS,
    validation: int = VALIDATION,
    seed: int = 0,
    check_counts: bool = True,
    cache: Root = None,
) -> SemiSplits:
    """Return labelled, unlabelled, validation and test images.

    Args:
        root: The folder; by default the one that FORKMERGE_DATA names.
        labels: How many training images keep their label; "all" for all.
        validation: How many training images are held out.
        seed: Draws both.
        check_counts: Whether there must be as many images as in the paper.
        cache: Where decoded images are kept.
    """
    data = load(root, cache=cache)
    if check_counts:
        check_paper_count("CIFAR-10's training images", len(data.images), TRAINING)
        check_paper_count("CIFAR-10's test images", len(data.test_images), TEST)
    return semi.split(data, labels, validation, seed, CLASSES, PREPARATION)


def load(root: Root = None, *, cache: Root = None) -> Images:
    """Return all images as bytes [n, 3, 32, 32], and their classes."""
    folder = data_folder(root, "CIFAR-10")
    binary = find(folder, ("", "cifar-10-batches-bin"), [f"{name}.bin" for name in _BATCHES])
    if binary is not None:
        paths = require("CIFAR-10", binary, [f"{name}.bin" for name in (*_BATCHES, "test_batch")], SOURCE)
        return _joined([_read_binary(path) for path in paths])
    pickled = find(folder, ("", "cifar-10-batches-py"), _BATCHES)
    if pickled is not None:
        paths = require("CIFAR-10", pickled, [*_BATCHES, "test_batch"], SOURCE)
        return _joined([_read_python(path) for path in paths])
    tensors = find(folder, ("cifar10", "cifar-10"), ["train.pt"])
    if tensors is not None:
        return images_of_tensors(require("CIFAR-10", tensors, ["train.pt", "test.pt"], SOURCE), CLASSES)
    if (folder / "cifar10_jpeg.npz").is_file():
        return images_of_pack(folder / "cifar10_jpeg.npz", SIDE, cache)
    raise missing("CIFAR-10", folder, [f"{name}.bin" for name in (*_BATCHES, "test_batch")], SOURCE)


def images_of_pack(path: Path, size: int, cache: Root) -> Images:
    """Return the training and test images of a pack of JPEG bytes."""
    pack = Pack(path, "whoever made the small packs")
    parts: list[Tensor] = []
    for part in ("train", "test"):
        pixels = decode_pack(pack, f"jpeg_{part}", f"offsets_{part}", size, cache=cache)
        classes = pack.codes(f"y_{part}", CLASSES)
        if len(classes) != len(pixels):
            raise ProblemError(f"{path} has {len(pixels)} {part} images and {len(classes)} classes.")
        parts += [torch.tensor(pixels), torch.from_numpy(classes)]
    return Images(*parts)


def images_of_tensors(paths: Sequence[Path], classes: int) -> Images:
    """Return the training and test images of two .pt files, bytes [n, 3, h, w] or [n, h, w, 3]."""
    parts: list[Tensor] = []
    for path in paths:
        images, labels = read_tensors(path)
        if images.dtype != torch.uint8 or images.dim() != 4 or 3 not in (images.shape[1], images.shape[3]):
            raise ProblemError(
                f"{path} has images of {images.dtype} and shape {tuple(images.shape)}: expected bytes [n, 3, h, w]."
            )
        if images.shape[1] != 3:
            images = images.permute(0, 3, 1, 2).contiguous()
        labels = labels.reshape(-1).long()
        if len(labels) != len(images):
            raise ProblemError(f"{path} has {len(images)} images and {len(labels)} classes.")
        check_codes(path, "labels", labels.numpy(), classes)
        parts += [images, labels]
    return Images(*parts)


def _joined(parts: list[tuple[Array, Array]]) -> Images:
    """Join training batches; the last part is the test."""
    images, classes = zip(*parts, strict=True)
    return Images(
        torch.from_numpy(np.concatenate(images[:-1])),
        torch.from_numpy(np.concatenate(classes[:-1])),
        torch.from_numpy(images[-1].copy()),
        torch.from_numpy(classes[-1]),
    )


def _read_binary(path: Path) -> tuple[Array, Array]:
    data = np.fromfile(path, np.uint8)
    if data.size == 0 or data.size % _ROW:
        raise ProblemError(
            f"{path} has {data.size:,} bytes, which is not a whole number of images of {_ROW} bytes: it is cut off or "
            "no batch of CIFAR-10's binary version. Get the file again."
        )
    rows = data.reshape(-1, _ROW)
    return _checked(path, rows[:, 1:], rows[:, 0])


def _read_python(path: Path) -> tuple[Array, Array]:
    content = read_arrays(path)
    images, classes = content.get("data"), content.get("labels")
    is_whole = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 2
    if not is_whole or images.shape[1] != _ROW - 1 or not isinstance(classes, list | np.ndarray):  # type: ignore[union-attr]
        raise ProblemError(f"{path} is no batch of CIFAR-10's Python version: expected data [n, 3072] and labels.")
    return _checked(path, images, np.asarray(classes))  # type: ignore[arg-type]  # an array, or the line above raised


def _checked(path: Path, images: Array, classes: Array) -> tuple[Array, Array]:
    if classes.ndim != 1 or len(classes) != len(images) or classes.dtype.kind not in "iu":
        raise ProblemError(f"{path} has {len(images)} images and labels of shape {classes.shape}.")
    check_codes(path, "labels", classes, CLASSES)
    return images.reshape(-1, 3, SIDE, SIDE), classes.astype(np.int64)
