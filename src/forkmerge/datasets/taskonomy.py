"""Views of one apartment from Taskonomy: segmentation, depth and normals; a small counterpart of NYUv2.

Read from `taskonomy_64.npz` with the arrays `rgb` [n, 64, 64, 3], `depth` (metres, 0 unknown), `normal` (−127 to 127,
0 unknown), `surfseg` or `semseg` (classes, 255 unknown) with their names, and `split` by camera (0 training, 1
validation, 2 test). The classes of `surfseg` are derived from geometry, so they are related to the normals; those of
`semseg` are another network's, and rare.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets import augment, dense
from forkmerge.datasets._classify import SmallConvNet
from forkmerge.datasets._features import encode_once
from forkmerge.datasets._files import Pack, Root, check_columns, data_folder
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.errors import ProblemError
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import DenseModel, EfficientNetLite, imagenet_weights, load_published
from forkmerge.problem.definition import Problem, Stream

FILE = "taskonomy_64.npz"
SOURCE = "the sample model of Taskonomy (Stanford), packed as forkmerge.datasets.taskonomy says"
MEAN, STD = (0.559, 0.554, 0.535), (0.166, 0.176, 0.200)
CLASSES = {"surfseg": 9, "semseg": 17}
SIDE = 64
_UNKNOWN = 255
_LAST_LAYER = 8  # the end of the fourth stage: 80 channels


def recipe(
    target: str = "segmentation",
    labels: Literal["surfseg", "semseg"] = "surfseg",
    steps: int = 600,
    interval: int = 200,
    width: int = 16,
    batch_size: int = 16,
    first_layer: int | None = None,
    seed: int = 0,
    root: str | None = None,
    cache: str | None = None,
) -> Recipe:
    """Return a small encoder with a DeepLab head per task, and one branch per other task.

    Args:
        target: segmentation, depth or normal.
        labels: Which classes to segment.
        steps: Training steps.
        interval: Steps between merges.
        width: Channels of the network's first layer, and inside its heads.
        batch_size: Images per step.
        first_layer: Instead of the small encoder, train layers of EfficientNet-Lite0 from this one to the ninth, with
            ImageNet weights, on features of the layers below that are computed once (needs `forkmerge[vision]`); 4 to
            6 have maps of at least an eighth of the image's size.
        seed: Draws the first weights, the order of the data and the augmentations.
        root: The folder; by default the one that FORKMERGE_DATA names.
        cache: Where features are kept.
    """
    network = partial(small_network, CLASSES[labels], width)
    if first_layer is not None:
        network = partial(pretrained_network, CLASSES[labels], first_layer, width)
    return Recipe(
        problem(target, root, labels=labels, batch_size=batch_size, first_layer=first_layer, cache=cache),
        model=network,
        optimizer=OptimizerOf("Adam", lr=1e-3),
        steps=steps,
        algorithm=ForkMerge("per_auxiliary", interval=interval),
        options={"seed": seed},
    )


def small_network(classes: int, width: int = 16) -> DenseModel:
    """Return a small encoder whose last map has an eighth of the image's size, and a small pyramid per task.

    Dropout is 0.1 in place of the usual 0.5, for a network of 16 channels.
    """
    return _dense(SmallConvNet(width, pool=False), classes, width)


def pretrained_network(classes: int, first_layer: int, width: int = 16) -> DenseModel:
    """Return layers of EfficientNet-Lite0 with ImageNet weights, on features of those below, and the same pyramids."""
    below = EfficientNetLite(last_layer=max(first_layer - 1, 0)).eval()
    with torch.no_grad():
        side = SIDE if first_layer == 0 else below.below(first_layer)(torch.zeros(1, 3, SIDE, SIDE)).shape[3]
    encoder = EfficientNetLite(first_layer, last_layer=_LAST_LAYER, output_stride=8, pool=False)
    load_published(encoder, imagenet_weights())
    return _dense(encoder, classes, width, scale=SIDE // side)


def _dense(encoder: nn.Module, classes: int, width: int, **options: Any) -> DenseModel:
    outputs = {"segmentation": classes, "depth": 1, "normal": 3}
    return DenseModel(encoder, outputs, (1, 2, 3), width, dropout=0.1, normalised_mean=False, **options)


def problem(
    target: str = "segmentation",
    root: Root = None,
    *,
    labels: Literal["surfseg", "semseg"] = "surfseg",
    batch_size: int = 16,
    augmented: bool = True,
    first_layer: int | None = None,
    cache: Root = None,
) -> Problem:
    """Return three tasks on the same images.

    Args:
        target: segmentation, depth or normal.
        root: The folder; by default the one that FORKMERGE_DATA names.
        labels: Which classes to segment.
        batch_size: Images per step.
        augmented: Whether training images are scaled, cropped and mirrored at random.
        first_layer: Give features of the layers of EfficientNet-Lite0 below this one in the place of images; these are
            only mirrored.
        cache: Where features are kept.
    """
    if labels not in CLASSES:
        raise ProblemError(f"labels must be 'surfseg' or 'semseg', got {labels!r}.")
    pack = Pack(data_folder(root, "Taskonomy") / FILE, SOURCE)
    split = pack.codes("split", 3)
    columns = _columns(pack, labels)
    check_columns(pack, {"split": split, **dict(zip(("rgb", labels, "depth", "normal"), columns, strict=True))})
    has_features = first_layer is not None
    if first_layer is not None:
        pixels = np.ascontiguousarray(pack["rgb"].transpose(0, 3, 1, 2))
        features = encode_once(pixels, pack.path, first_layer, cache=cache)
        columns = (torch.tensor(features), *columns[1:])
    training, validation, test = (
        TensorDataset(*(column[torch.from_numpy(np.flatnonzero(split == part))] for column in columns))
        for part in range(3)
    )
    return Problem(
        target,
        [Stream(training, dense.SceneLosses(augmented, has_features), dense.TASKS, batch_size)],
        validation=dense.scene_evaluations(validation, CLASSES[labels], batch_size, features=has_features),
        test=dense.scene_evaluations(test, CLASSES[labels], batch_size, features=has_features),
    )


def _columns(pack: Pack, labels: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images = torch.tensor(pack["rgb"]).permute(0, 3, 1, 2)
    classes = torch.from_numpy(pack.codes(labels, CLASSES[labels], _UNKNOWN))
    depth = torch.tensor(pack["depth"].astype(np.float32))[:, None]
    normals = torch.tensor(pack["normal"].astype(np.float32) / 127).permute(0, 3, 1, 2)
    classes[classes == _UNKNOWN] = dense.IGNORED
    return augment.as_floats(images, MEAN, STD).contiguous(), classes, depth, normals.contiguous()
