"""SVHN with 1000 labels, 64931 images without, and 7326 to validate on, as in the paper.

Read from the cropped digits in MATLAB's format (`train_32x32.mat`, `test_32x32.mat`), `svhn/train.pt` and
`svhn/test.pt`, or the small pack `svhn_jpeg.npz`, whichever is found first.
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
from forkmerge.datasets._files import Root, check_paper_count, data_folder, find, missing, require
from forkmerge.datasets._mat import read_mat
from forkmerge.datasets.cifar10 import images_of_pack, images_of_tensors
from forkmerge.datasets.semi import Images, SemiSplits
from forkmerge.errors import ProblemError
from forkmerge.experiments.recipe import Recipe

CLASSES, SIDE = 10, 32
LABELS, VALIDATION, TRAINING, TEST = 1000, 7326, 73_257, 26_032
SOURCE = "the page of the Street View House Numbers at Stanford (format 2, cropped digits)"
PREPARATION = CropAndFlip(mean=0.5, std=0.5, padding=2, flip=False)  # a mirrored digit is another sign
RADIUS = 1.0  # ε of VAT of Oliver et al., NeurIPS 2018, whose images of SVHN are prepared like these: −1 to 1, no noise
_FILES = ["train_32x32.mat", "test_32x32.mat"]


def recipe(
    network: semi.Network = "small",
    steps: int = 2000,
    seed: int = 0,
    labels: int | Literal["all"] = LABELS,
    validation: int = VALIDATION,
    root: str | None = None,
    cache: str | None = None,
) -> Recipe:
    """Return supervised training on the labelled images alone (see `cifar10.recipe`)."""
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
    """Return the paper's semi-supervised setting (see `cifar10.semi_supervised`)."""
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
    """Return labelled, unlabelled, validation and test images (see `cifar10.splits`)."""
    data = load(root, cache=cache)
    if check_counts:
        check_paper_count("SVHN's training images", len(data.images), TRAINING)
        check_paper_count("SVHN's test images", len(data.test_images), TEST)
    return semi.split(data, labels, validation, seed, CLASSES, PREPARATION)


def load(root: Root = None, *, cache: Root = None) -> Images:
    """Return all images as bytes [n, 3, 32, 32], and their digits."""
    folder = data_folder(root, "SVHN")
    matlab = find(folder, ("", "svhn", "SVHN"), _FILES)
    if matlab is not None:
        training, test = require("SVHN", matlab, _FILES, SOURCE)
        return Images(*_read_digits(training), *_read_digits(test))
    tensors = find(folder, ("svhn", "SVHN"), ["train.pt"])
    if tensors is not None:
        return images_of_tensors(require("SVHN", tensors, ["train.pt", "test.pt"], SOURCE), CLASSES)
    if (folder / "svhn_jpeg.npz").is_file():
        return images_of_pack(folder / "svhn_jpeg.npz", SIDE, cache)
    raise missing("SVHN", folder, _FILES, SOURCE)


def _read_digits(path: Path) -> tuple[Tensor, Tensor]:
    arrays = read_mat(path, ("X", "y"))
    pixels, digits = arrays["X"], arrays["y"].reshape(-1)
    if pixels.ndim == 3:
        pixels = pixels[..., None]  # MATLAB drops the last dimension of a single image
    if pixels.dtype != np.uint8 or pixels.shape[:3] != (SIDE, SIDE, 3) or pixels.shape[3] != len(digits):
        raise ProblemError(
            f"{path}: X has shape {pixels.shape} of {pixels.dtype} and y {len(digits)} values: expected bytes "
            f"[{SIDE}, {SIDE}, 3, n] and n digits."
        )
    if len(digits) and not 1 <= digits.min() <= digits.max() <= CLASSES:
        raise ProblemError(f"{path}: y must hold digits from 1 to 10, where 10 is a zero, got {digits.max():g}.")
    images = np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))
    return torch.from_numpy(images), torch.from_numpy(digits.astype(np.int64) % CLASSES)
