"""Views of one apartment from Taskonomy: segmentation, depth and normals; a small counterpart of NYUv2.

Read from `taskonomy_64.npz` with the arrays `rgb` [n, 64, 64, 3], `depth` (metres, 0 unknown), `normal` (−127 to 127,
0 unknown), `surfseg` or `semseg` (classes, 255 unknown) with their names, and `split` by camera (0 training, 1
validation, 2 test). The classes of `surfseg` are derived from geometry, so they are related to the normals; those of
`semseg` are another network's, and rare.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets import augment, dense
from forkmerge.datasets._classify import SmallConvNet
from forkmerge.datasets._files import Pack, Root, check_columns, data_folder
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.errors import ProblemError
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import DenseModel
from forkmerge.problem.definition import Problem, Stream

FILE = "taskonomy_64.npz"
SOURCE = "the sample model of Taskonomy (Stanford), packed as forkmerge.datasets.taskonomy says"
MEAN, STD = (0.559, 0.554, 0.535), (0.166, 0.176, 0.200)
CLASSES = {"surfseg": 9, "semseg": 17}
_UNKNOWN = 255


def recipe(
    target: str = "segmentation",
    labels: Literal["surfseg", "semseg"] = "surfseg",
    steps: int = 600,
    interval: int = 200,
    width: int = 16,
    batch_size: int = 16,
    seed: int = 0,
    root: str | None = None,
) -> Recipe:
    """Return a small encoder with a DeepLab head per task, and one branch per other task.

    Args:
        target: segmentation, depth or normal.
        labels: Which classes to segment.
        steps: Training steps.
        interval: Steps between merges.
        width: Channels of the network's first layer, and inside its heads.
        batch_size: Images per step.
        seed: Draws the first weights, the order of the data and the augmentations.
        root: The folder; by default the one that FORKMERGE_DATA names.
    """
    return Recipe(
        problem(target, root, labels=labels, batch_size=batch_size),
        model=partial(small_network, CLASSES[labels], width),
        optimizer=OptimizerOf("Adam", lr=1e-3),
        steps=steps,
        algorithm=ForkMerge("per_auxiliary", interval=interval),
        options={"seed": seed},
    )


def small_network(classes: int, width: int = 16) -> DenseModel:
    """Return a small encoder whose last map has an eighth of the image's size, and a small pyramid per task.

    Dropout is 0.1 in place of the usual 0.5, for a network of 16 channels.
    """
    outputs = {"segmentation": classes, "depth": 1, "normal": 3}
    encoder = SmallConvNet(width, pool=False)
    return DenseModel(encoder, outputs, rates=(1, 2, 3), width=width, dropout=0.1, normalised_mean=False)


def problem(
    target: str = "segmentation",
    root: Root = None,
    *,
    labels: Literal["surfseg", "semseg"] = "surfseg",
    batch_size: int = 16,
    augmented: bool = True,
) -> Problem:
    """Return three tasks on the same images.

    Args:
        target: segmentation, depth or normal.
        root: The folder; by default the one that FORKMERGE_DATA names.
        labels: Which classes to segment.
        batch_size: Images per step.
        augmented: Whether training images are scaled, cropped and mirrored at random.
    """
    if labels not in CLASSES:
        raise ProblemError(f"labels must be 'surfseg' or 'semseg', got {labels!r}.")
    pack = Pack(data_folder(root, "Taskonomy") / FILE, SOURCE)
    split = pack.codes("split", 3)
    columns = _columns(pack, labels)
    check_columns(pack, {"split": split, **dict(zip(("rgb", labels, "depth", "normal"), columns, strict=True))})
    training, validation, test = (
        TensorDataset(*(column[torch.from_numpy(np.flatnonzero(split == part))] for column in columns))
        for part in range(3)
    )
    return Problem(
        target,
        [Stream(training, dense.SceneLosses(augmented), dense.TASKS, batch_size)],
        validation=dense.scene_evaluations(validation, CLASSES[labels], batch_size),
        test=dense.scene_evaluations(test, CLASSES[labels], batch_size),
    )


def _columns(pack: Pack, labels: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images = torch.tensor(pack["rgb"]).permute(0, 3, 1, 2)
    classes = torch.from_numpy(pack.codes(labels, CLASSES[labels], _UNKNOWN))
    depth = torch.tensor(pack["depth"].astype(np.float32))[:, None]
    normals = torch.tensor(pack["normal"].astype(np.float32) / 127).permute(0, 3, 1, 2)
    classes[classes == _UNKNOWN] = dense.IGNORED
    return augment.as_floats(images, MEAN, STD).contiguous(), classes, depth, normals.contiguous()
