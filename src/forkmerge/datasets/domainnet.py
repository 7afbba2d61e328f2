"""DomainNet: 345 classes in six domains, a task each; half of every test list validates, as in the paper.

Read from the image lists of the authors (`clipart_train.txt`, `clipart_test.txt`, …, a path and a class per line) in
the folder itself, or in `image_list` or `txts` inside it; paths start at the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets._classify import ClassificationLosses, PredictClass, ResizedCropAndFlip
from forkmerge.datasets._files import Root, check_paper_count, data_folder, find, missing, weights_file
from forkmerge.datasets.images import CachedImages, ImageFiles
from forkmerge.engine.training.optimizers import OptimizerOf, SchedulerOf
from forkmerge.errors import ProblemError, unknown_name
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import Classifier, ResNet, ViT, load_published
from forkmerge.problem.definition import Evaluation, Problem, Stream
from forkmerge.problem.example_order import sample_indices
from forkmerge.problem.metrics import accuracy

CLASSES = 345
# Training, validation and test images of the paper's table, in thousands.
COUNTS = {
    "clipart": (33.5, 7.3, 7.3),
    "infograph": (36.0, 7.8, 7.8),
    "painting": (50.4, 10.9, 10.9),
    "quickdraw": (120.7, 25.9, 25.9),
    "real": (120.9, 26.0, 26.0),
    "sketch": (48.2, 10.5, 10.5),
}
DOMAINS = tuple(COUNTS)
TOLERANCE = 60  # images: the table is rounded to hundreds, in one cell downwards
SOURCE = "the DomainNet page of Boston University (cleaned version), or through TLlib, with its image lists"
SIDE, BATCH = 256, 48


def recipe(
    target: str = "clipart",
    network: Literal["resnet-18", "resnet-101", "vit-base"] = "resnet-101",
    weights: str | None = None,
    batch_size: int = BATCH,
    steps: int = 50_000,
    seed: int = 0,
    root: str | None = None,
    cache: str | None = None,
    check_counts: bool = True,
) -> Recipe:
    """Return the paper's setting: SGD or, for ViT, AdamW, with cosine annealing, a merge every 12.5K of 50K steps.

    Args:
        target: A domain.
        network: The encoder; every domain has a linear head of its own.
        weights: A file of published ImageNet weights of it, which the paper starts from; looked for in the data
            folder, too.
        batch_size: Images per step.
        steps: Training steps.
        seed: Draws the first weights, the order of the data and the augmentations.
        root: The folder; by default the one that FORKMERGE_DATA names.
        cache: Where decoded images are kept.
        check_counts: Whether there must be about as many images as in the paper.
    """
    is_vit = network == "vit-base"
    lr = {"encoder.": 0.1}  # pre-trained layers learn slower than new heads
    return Recipe(
        problem(target, root, batch_size=batch_size, cache=cache, check_counts=check_counts),
        model=partial(make_network, network, weights_file(root, weights)),
        optimizer=OptimizerOf("AdamW", group_lr=lr, lr=1e-3, weight_decay=0.05)
        if is_vit
        else OptimizerOf("SGD", group_lr=lr, lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4),
        steps=steps,
        algorithm=ForkMerge.paper(mixtures="per_auxiliary", interval=max(1, steps // 4)),
        options={"seed": seed, "scheduler": SchedulerOf("CosineAnnealingLR", T_max="100%")},
    )


def make_network(network: str, weights: str | None = None) -> Classifier:
    """Return an encoder with a head per domain."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "resnet-18": partial(ResNet, 18),
        "resnet-101": partial(ResNet, 101),
        "vit-base": ViT,
    }
    if network not in makers:
        raise ProblemError(unknown_name("network", network, makers))
    encoder = makers[network]()
    if weights is not None:
        load_published(encoder, weights)
    return Classifier(encoder, dict.fromkeys(DOMAINS, CLASSES))


def problem(
    target: str = "clipart",
    root: Root = None,
    *,
    domains: Sequence[str] = DOMAINS,
    weights: Literal["loss", "sampling"] = "sampling",
    keep: Literal["decoded", "files"] = "decoded",
    size: int = SIDE,
    crop: int = 224,
    batch_size: int = BATCH,
    seed: int = 0,
    cache: Root = None,
    check_counts: bool = True,
) -> Problem:
    """Return one task per domain.

    Args:
        target: A domain.
        root: The folder; by default the one that FORKMERGE_DATA names.
        domains: Whose images are read.
        weights: What task weights mean; in the authors' script of ForkMerge, the share of steps on a domain.
        keep: Whether decoded images are kept in the cache folder, 115 GB in all, or files are decoded when read.
        size: All images are brought to size × size pixels first.
        crop: The network's input: a random rectangle of these when training, their centre otherwise.
        batch_size: Images per step: of one domain, or for a method that combines tasks an equal part from each; with
            `weights="loss"` that many of every domain.
        seed: Draws the half of the test lists that validates.
        cache: Where decoded images are kept.
        check_counts: Whether there must be about as many images as in the paper.
    """
    folder = data_folder(root, "DomainNet")
    prepare = ResizedCropAndFlip(crop)
    streams, validation, test = {}, {}, {}
    for domain in domains:
        if domain not in COUNTS:
            raise ProblemError(unknown_name("domain", domain, DOMAINS))
        lists = [read_list(folder, f"{domain}_{part}.txt") for part in ("train", "test")]
        validation_rows = set(sample_indices(len(lists[1][0]), len(lists[1][0]) // 2, seed, "domainnet", domain))
        test_rows = [index for index in range(len(lists[1][0])) if index not in validation_rows]
        if check_counts:
            counts = (len(lists[0][0]), len(validation_rows), len(test_rows))
            for part, number, expected in zip(("training", "validation", "test"), counts, COUNTS[domain], strict=True):
                check_paper_count(f"DomainNet's {part} images of {domain}", number, 1000 * expected, TOLERANCE)
        training, others = (_images(paths, classes, size, keep, cache) for paths, classes in lists)
        streams[domain] = Stream(training, ClassificationLosses(prepare), domain, batch_size)
        predict = PredictClass(domain, prepare)
        validation[domain] = Evaluation(Subset(others, sorted(validation_rows)), accuracy, predict=predict)
        test[domain] = Evaluation(Subset(others, test_rows), accuracy, predict=predict)
    return Problem(target, streams, validation, test, weights=weights)


def read_list(folder: Path, name: str) -> tuple[list[Path], list[int]]:
    """Return the images and classes of a list; a bad line, or an image that is not there, is named."""
    lists = find(folder, ("", "image_list", "txts", "splits"), [name])
    if lists is None:
        raise missing("DomainNet", folder, [name], SOURCE)
    file, paths, classes = lists / name, list[Path](), list[int]()
    for number, line in enumerate(file.read_text("utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        path, _, kind = line.strip().rpartition(" ")
        if not path or not kind.isdecimal() or int(kind) >= CLASSES:
            raise ProblemError(
                f"{file}, line {number}: expected a path and a class from 0 to {CLASSES - 1}, found {line!r}."
            )
        paths.append(folder / path)
        classes.append(int(kind))
    if not paths:
        raise ProblemError(f"{file} names no images. Get the file again.")
    absent = next((path for path in paths if not path.is_file()), None)
    if absent is not None:
        raise ProblemError(f"{file} names {absent}, which is not there. Get DomainNet from {SOURCE}.")
    return paths, classes


def _images(paths: list[Path], classes: list[int], size: int, keep: str, cache: Root) -> Dataset[Any]:
    labels = torch.tensor(classes)
    if keep == "files":
        return ImageFiles(paths, labels, size=size)
    if keep != "decoded":
        raise ProblemError(f"keep must be 'decoded' or 'files', got {keep!r}.")
    return CachedImages(paths, labels, size=size, as_bytes=True, cache=cache, workers=2)
