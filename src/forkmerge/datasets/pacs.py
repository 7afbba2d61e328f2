"""PACS: seven classes in four domains, a task each; a small counterpart of DomainNet, for two cores.

Read from `pacs_64_jpeg.npz` with the arrays `jpeg` (all files as one stream of bytes), `offsets` [n + 1], `labels`,
`domains`, `split` (0 training, 1 validation, 2 test), `class_names` and `domain_names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets._classify import (
    ClassificationLosses,
    CropAndFlip,
    PredictClass,
    Preparation,
    few_of_each,
    small_classifier,
)
from forkmerge.datasets._features import MirrorViews, encode_once, pretrained_encoder
from forkmerge.datasets._files import Array, Pack, Root, check_columns, data_folder
from forkmerge.datasets._packs import decode_pack
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.errors import ProblemError, check_count
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import Classifier
from forkmerge.problem.definition import Evaluation, Problem, Stream
from forkmerge.problem.metrics import accuracy, nll

DOMAINS, CLASSES = ("art_painting", "cartoon", "photo", "sketch"), 7
FILE = "pacs_64_jpeg.npz"
SOURCE = (
    "PACS (Li et al., Deeper, Broader and Artier Domain Generalization, 2017), packed as forkmerge.datasets.pacs says"
)


def recipe(
    target: str = "photo",
    size: int = 32,
    steps: int = 600,
    interval: int = 200,
    width: int = 16,
    batch_size: int = 32,
    shared_head: bool = False,
    score: Literal["accuracy", "nll"] = "accuracy",
    first_layer: int | None = None,
    labels: int | None = None,
    others_as_test: bool = False,
    seed: int = 0,
    root: str | None = None,
    cache: str | None = None,
) -> Recipe:
    """Return a small convolutional network on PACS, with one branch per other domain.

    Args:
        target: A domain.
        size: Side of the images.
        steps: Training steps.
        interval: Steps between merges.
        width: Channels of the network's first layer.
        batch_size: Images per step and task.
        shared_head: Whether all domains share one linear head; otherwise each has its own.
        score: What validation measures, and searches go by; the test split is measured by accuracy in any case.
        first_layer: Instead of the small network, train EfficientNet-Lite0 from this layer on, with ImageNet weights,
            on features of the layers below that are computed once (needs `forkmerge[vision]`; meant for size 64).
        labels: Training images, and as many validation images, of every class and domain; all where None.
        others_as_test: Whether the training images that `labels` leaves out take the place of the test split: options
            may be chosen on them as often as one likes.
        seed: Draws the first weights, the order of the data and the augmentations.
        root: The folder; by default the one that FORKMERGE_DATA names.
        cache: Where decoded images are kept.
    """
    classes = dict.fromkeys(DOMAINS, CLASSES)
    options: dict[str, Any] = {"size": size, "batch_size": batch_size, "score": score, "cache": cache}
    options |= {"first_layer": first_layer, "labels": labels, "others_as_test": others_as_test, "seed": seed}
    model = partial(small_classifier, classes, width=width, shared_head=shared_head)
    if first_layer is not None:
        model = partial(_pretrained_classifier, classes, first_layer, shared_head)
    return Recipe(
        problem(target, root, **options),
        model=model,
        optimizer=OptimizerOf("Adam", lr=1e-3),
        steps=steps,
        algorithm=ForkMerge("per_auxiliary", interval=interval),
        options={"seed": seed},
    )


def problem(
    target: str = "photo",
    root: Root = None,
    *,
    size: int = 32,
    batch_size: int = 32,
    weights: Literal["loss", "sampling"] = "loss",
    score: Literal["accuracy", "nll"] = "accuracy",
    first_layer: int | None = None,
    labels: int | None = None,
    others_as_test: bool = False,
    seed: int = 0,
    cache: Root = None,
) -> Problem:
    """Return one task per domain.

    Args:
        target: A domain.
        root: The folder; by default the one that FORKMERGE_DATA names.
        size: Side of the images.
        batch_size: Images per step and task.
        weights: What task weights mean; factors of losses, so that gradient methods have all tasks in a step.
        score: What validation measures: accuracy, or the smoother −log p of the true class.
        first_layer: Give features of the layers of EfficientNet-Lite0 below this one in the place of images.
        labels: Training images, and as many validation images, of every class and domain; all where None.
        others_as_test: Whether the training images that `labels` leaves out take the place of the test split: options
            may be chosen on them as often as one likes.
        seed: Draws these.
        cache: Where decoded images are kept.
    """
    if score not in ("accuracy", "nll"):
        raise ProblemError(f"score must be 'accuracy' or 'nll', got {score!r}.")
    if others_as_test and labels is None:
        raise ProblemError("others_as_test needs labels=…: without it, every training image is trained on.")
    metric = accuracy if score == "accuracy" else nll
    pack = Pack(data_folder(root, "PACS") / FILE, SOURCE)
    names = pack["domain_names"].tolist()
    classes, domains, split = pack.codes("labels", CLASSES), pack.codes("domains", len(names)), pack.codes("split", 3)
    pixels = decode_pack(pack, "jpeg", "offsets", size, cache=cache)
    check_columns(pack, {"images": pixels, "labels": classes, "domains": domains, "split": split})
    prepare: Preparation = CropAndFlip(padding=size // 8)
    inputs: Array = pixels
    if first_layer is not None:
        prepare, inputs = MirrorViews(), encode_once(pixels, pack.path, first_layer, cache=cache)
    streams, validation, test = {}, {}, {}
    for code, name in enumerate(names):
        rows = [np.flatnonzero((domains == code) & (split == part)) for part in range(3)]
        if labels is not None:
            few = [few_of_each(part, classes, check_count("labels", labels), seed) for part in rows[:2]]
            rows = [*few, np.setdiff1d(rows[0], few[0]) if others_as_test else rows[2]]
        parts = [TensorDataset(torch.tensor(inputs[part]), torch.tensor(classes[part])) for part in rows]
        streams[name] = Stream(parts[0], ClassificationLosses(prepare), name, batch_size)
        predict = PredictClass(name, prepare)
        validation[name] = Evaluation(parts[1], metric, predict=predict)
        test[name] = Evaluation(parts[2], accuracy, predict=predict)
    return Problem(target, streams, validation, test, weights=weights)


def _pretrained_classifier(classes: Mapping[str, int], first_layer: int, shared_head: bool) -> Classifier:
    return Classifier(pretrained_encoder(first_layer), classes, shared_head=shared_head)
