"""NYUv2: 13-class segmentation, depth and surface normals of 636 / 159 / 654 indoor scenes, as in the paper.

Read from the layout of MTAN and LibMTL: folders `train` and `val` (the test images), in each of them `image`, `label`,
`depth` and `normal`, with files `0.npy`, `1.npy`, …. Which 159 of the 795 training images validate is fixed by the
file `nyuv2_validation.txt` beside this one, or by a file in the form of the authors' scripts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets import dense
from forkmerge.datasets._files import (
    READING_ERRORS,
    Array,
    Root,
    check_codes,
    check_paper_count,
    data_folder,
    find,
    missing,
    weights_file,
)
from forkmerge.engine.training.optimizers import OptimizerOf, SchedulerOf
from forkmerge.errors import ProblemError, is_count
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import MTAN, DenseModel, ResNet, load_published
from forkmerge.problem.definition import Problem, Stream

CLASSES = 13
OUTPUTS = {"segmentation": CLASSES, "depth": 1, "normal": 3}
TRAINING, VALIDATION, TEST = 636, 159, 654
BATCH, EPOCHS = 8, 200
SOURCE = "the preprocessed NYUv2 that the authors of MTAN offer (LibMTL links the same files)"
_SHAPES = {"image": 3, "label": None, "depth": 1, "normal": 3}  # channels, in the order of a batch


def recipe(
    target: str = "segmentation",
    network: Literal["deeplab", "mtan"] = "deeplab",
    weights: str | None = None,
    batch_size: int = BATCH,
    steps: int | None = None,
    seed: int = 0,
    augmented: bool = True,
    split: str | None = None,
    root: str | None = None,
    check_counts: bool = True,
) -> Recipe:
    """Return the paper's setting: dilated ResNet-50, Adam 1e-4 halved half-way, a merge every 10 of 200 epochs.

    Args:
        target: segmentation, depth or normal.
        network: DeepLab heads on the encoder, or MTAN.
        weights: A file of published ImageNet weights of ResNet-50, which the paper starts from; looked for in the data
            folder, too.
        batch_size: Images per step.
        steps: Training steps; by default the paper's 200 epochs.
        seed: Draws the first weights, the order of the data and the augmentations.
        augmented: Whether training images are scaled, cropped and mirrored at random; in the authors' scripts they are
            not.
        split: A file that says which images train and which validate, as in `problem`.
        root: The folder; by default the one that FORKMERGE_DATA names.
        check_counts: Whether there must be as many images as in the paper.
    """
    if steps is None:
        steps = EPOCHS * max(1, TRAINING // batch_size)
    return Recipe(
        problem(target, root, augmented=augmented, split=split, batch_size=batch_size, check_counts=check_counts),
        model=partial(make_network, network, weights_file(root, weights)),
        optimizer=OptimizerOf("Adam", lr=1e-4, weight_decay=1e-5),
        steps=steps,
        algorithm=ForkMerge.paper(mixtures="per_auxiliary", interval=max(1, steps // 20)),
        options={"seed": seed, "scheduler": SchedulerOf("StepLR", step_size="50%", gamma=0.5)},
    )


def make_network(network: str, weights: str | None = None, depth: int = 50) -> nn.Module:
    """Return a dilated ResNet with a DeepLab head per task, or MTAN on it."""
    if network not in ("deeplab", "mtan"):
        raise ProblemError(f"network must be 'deeplab' or 'mtan', got {network!r}.")
    encoder = ResNet(depth, output_stride=8, pool=False)
    if weights is not None:
        load_published(encoder, weights)
    return DenseModel(encoder, OUTPUTS) if network == "deeplab" else MTAN(encoder, OUTPUTS)


def problem(
    target: str = "segmentation",
    root: Root = None,
    *,
    augmented: bool = True,
    split: Root = None,
    batch_size: int = BATCH,
    check_counts: bool = True,
) -> Problem:
    """Return three tasks on the same images.

    Args:
        target: segmentation, depth or normal.
        root: The folder; by default the one that FORKMERGE_DATA names.
        augmented: Whether training images are scaled, cropped and mirrored at random.
        split: A JSON file `{"train": […], "val": […]}` with the numbers of the images in the folder `train`, here or in
            the data folder: `data_split.json` of the authors' scripts is one. By default `nyuv2_validation.txt`.
        batch_size: Images per step.
        check_counts: Whether there must be as many images as in the paper.
    """
    folder = data_folder(root, "NYUv2")
    scenes = find(folder, ("", "nyuv2", "NYUv2", "nyu"), ["train/image"])
    if scenes is None:
        raise missing(
            "NYUv2", folder, [f"{part}/{kind}/0.npy" for part in ("train", "val") for kind in _SHAPES], SOURCE
        )
    training, test = Scenes(scenes / "train"), Scenes(scenes / "val")
    if check_counts:
        check_paper_count(f"NYUv2's training images in {training.folder}", len(training), TRAINING + VALIDATION)
        check_paper_count(f"NYUv2's test images in {test.folder}", len(test), TEST)
    if split is None:
        validation_rows = validation_indices(len(training))
        training_rows = sorted(set(range(len(training))) - set(validation_rows))
    else:
        training_rows, validation_rows = read_split(_split_file(split, (folder, scenes)), len(training), check_counts)
    return Problem(
        target,
        [Stream(Subset(training, training_rows), dense.SceneLosses(augmented), dense.TASKS, batch_size)],
        validation=dense.scene_evaluations(Subset(training, validation_rows), CLASSES, batch_size),
        test=dense.scene_evaluations(test, CLASSES, batch_size),
    )


def validation_indices(count: int = TRAINING + VALIDATION) -> list[int]:
    """Return which training images validate: those of the split file, or for fewer images those of them that exist."""
    lines = Path(__file__).with_name("nyuv2_validation.txt").read_text("ascii").split("\n")
    listed = [int(line) for line in lines if line and not line.startswith("#")]
    return [index for index in listed if index < count] or [count - 1]


def read_split(path: Path, count: int, check_counts: bool = True) -> tuple[list[int], list[int]]:
    """Return which of `count` images train and which validate; a file that cannot be meant is refused.

    Args:
        path: A JSON file `{"train": […], "val": […]}`.
        count: How many images there are.
        check_counts: Whether there must be as many of both as in the paper.
    """
    try:
        parts = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ProblemError(f"cannot read {path}: {error}.") from None
    rows: list[list[int]] = []
    for name, expected in (("train", TRAINING), ("val", VALIDATION)):
        listed = parts.get(name) if isinstance(parts, dict) else None
        if not isinstance(listed, list) or not listed:
            raise ProblemError(f'{path}: expected {{"train": [numbers], "val": [numbers]}}, found no {name!r}.')
        wrong = [index for index in listed if not is_count(index, 0) or index >= count]
        if wrong:
            raise ProblemError(f"{path}: {name!r} holds {wrong[0]!r}, expected numbers from 0 to {count - 1}.")
        if check_counts:
            check_paper_count(f"{path}, {name!r}", len(listed), expected)
        rows.append(listed)
    twice = [index for index, times in Counter(rows[0] + rows[1]).items() if times > 1]
    if twice:
        raise ProblemError(
            f"{path} names image {twice[0]} more than once: every image trains or validates, never both."
        )
    return rows[0], rows[1]


def _split_file(split: Root, folders: Sequence[Path]) -> Path:
    """Return the path of a split, as given or in one of the folders."""
    paths = [Path(str(split)), *(folder / str(split) for folder in folders)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ProblemError(
            f"NYUv2: there is no file {str(split)!r}, here or in {folders[0]}: pass split=… with its path."
        )
    return path


class Scenes(Dataset[Any]):
    """Scenes of one folder; batches are images, labels, depths and normals.

    All files are looked at when it is made: their number, names, shapes and sizes; their values when they are read.

    Args:
        folder: With the folders `image`, `label`, `depth` and `normal`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = len(list((folder / "image").glob("*.npy")))
        absent = [
            f"{kind}/{index}.npy"
            for kind in _SHAPES
            for index in range(max(self._count, 1))
            if not (folder / kind / f"{index}.npy").is_file()
        ]
        if absent:
            raise missing("NYUv2", folder, absent, SOURCE)
        size: tuple[int, ...] | None = None
        for index in range(self._count):
            for kind, channels in _SHAPES.items():
                shape = _shape(self._path(kind, index))
                size = size or shape[:2]
                if shape != (size if channels is None else (*size, channels)):
                    raise ProblemError(
                        f"{self._path(kind, index)} has shape {shape}: expected {size} as of the first image"
                        + (f", and {channels} channels." if channels else ".")
                    )

    def _path(self, kind: str, index: int) -> Path:
        return self.folder / kind / f"{index}.npy"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"scene {index} of {len(self)}")
        return tuple(column[0] for column in self.read_batch(torch.tensor([index % len(self)])))

    def read_batch(self, indices: Tensor) -> list[Tensor]:
        """Return images [n, 3, h, w], labels [n, h, w], depths [n, 1, h, w] and normals [n, 3, h, w]."""
        columns = []
        for kind in _SHAPES:
            parts = [self._read(kind, index) for index in indices.tolist()]
            columns.append(torch.from_numpy(np.stack(parts)))
        return columns

    def _read(self, kind: str, index: int) -> Array:
        path = self._path(kind, index)
        values = _load(path)
        if kind == "label":
            check_codes(path, "label", values, CLASSES, dense.IGNORED)
            return values.astype(np.int64)
        if not bool(np.isfinite(values).all()):
            raise ProblemError(f"{path} holds values that are not finite. Get the file again.")
        return np.ascontiguousarray(values.astype(np.float32).transpose(2, 0, 1))


def _shape(path: Path) -> tuple[int, ...]:
    """Return the shape of a .npy file, which must be as long as its own header says."""
    array = _load(path, mmap_mode="r")
    if array.dtype.kind not in "fiu":
        raise ProblemError(f"{path} holds {array.dtype}: expected numbers.")
    shape: tuple[int, ...] = array.shape
    return shape


def _load(path: Path, mmap_mode: Literal["r"] | None = None) -> Array:
    try:
        array = np.load(path, mmap_mode, allow_pickle=False)
    except READING_ERRORS as error:
        raise ProblemError(f"cannot read {path}: {error}. Get the file again.") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise ProblemError(f"cannot read {path}: it is an archive, no array. Get the file again.")
    return array
