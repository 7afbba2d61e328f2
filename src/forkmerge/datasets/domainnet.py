"""DomainNet: 345 classes in six domains, a task each; half of every test list validates, as in the paper.

Read from the image lists of the authors (`clipart_train.txt`, `clipart_test.txt`, …, a path and a class per line) in
the folder itself, or in `image_list` or `txts` inside it; paths start at the folder. The authors' scripts have lists of
their halves, `clipart_val.txt` beside a shorter `clipart_test.txt`: where there is one, it is what validates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from forkmerge.problem.made_auxiliaries import merge_auxiliaries
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
OTHERS = "others"


def recipe(
    target: str = "clipart",
    network: Literal["resnet-18", "resnet-101", "vit-base"] = "resnet-101",
    weights: str | None = None,
    batch_size: int = BATCH,
    steps: int = 50_000,
    seed: int = 0,
    domains: Sequence[str] = DOMAINS,
    mixed: bool = False,
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
        domains: Whose images are read.
        mixed: Whether all domains but the target's are one auxiliary, as in `problem`.
        root: The folder; by default the one that FORKMERGE_DATA names.
        cache: Where decoded images are kept.
        check_counts: Whether there must be about as many images as in the paper.
    """
    is_vit = network == "vit-base"
    lr = {"encoder.": 0.1}  # pre-trained layers learn slower than new heads
    options: dict[str, Any] = {"batch_size": batch_size, "cache": cache, "check_counts": check_counts}
    return Recipe(
        problem(target, root, domains=domains, mixed=mixed, **options),
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
    mixed: bool = False,
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
        mixed: Whether all domains but the target's are one auxiliary, "others": a step of it reads `batch_size` images,
            an equal part from each, and its loss is the mean over domains.
        seed: Draws the half of a test list that validates, where there is no list of it.
        cache: Where decoded images are kept.
        check_counts: Whether there must be about as many images as in the paper.
    """
    folder = data_folder(root, "DomainNet")
    prepare = ResizedCropAndFlip(crop)
    images = partial(_images, size=size, keep=keep, cache=cache)
    streams, validation, test = {}, {}, {}
    for domain in domains:
        if domain not in COUNTS:
            raise ProblemError(unknown_name("domain", domain, DOMAINS))
        lists = _three_lists(folder, domain, seed, check_counts)
        streams[domain] = Stream(images(lists[0]), ClassificationLosses(prepare), domain, batch_size)
        evaluation = partial(Evaluation, metrics=accuracy, predict=PredictClass(domain, prepare))
        validation[domain], test[domain] = (evaluation(held) for held in _held_out(images, lists[1:]))
    together = Problem(target, streams, validation, test, weights=weights)
    return _mix_others(together, batch_size) if mixed else together


def _mix_others(problem: Problem, batch_size: int) -> Problem:
    """Return the problem whose auxiliaries are one; its batch is divided among them as evenly as can be."""
    others, streams = problem.auxiliaries, dict(problem.stream_map)
    for index, domain in enumerate(others):
        share = batch_size // len(others) + (index < batch_size % len(others))
        streams[domain] = replace(streams[domain], batch_size=max(share, 1))
    equal = dict.fromkeys(others, 1 / len(others))
    return merge_auxiliaries(replace(problem, streams=streams), OTHERS, others, equal)


class ImageList(NamedTuple):
    """Images and their classes; of a list that two splits share, the rows of one of them."""

    paths: list[Path]
    classes: list[int]
    rows: list[int] | None = None

    def __len__(self) -> int:
        return len(self.paths if self.rows is None else self.rows)


def _three_lists(folder: Path, domain: str, seed: int, check_counts: bool) -> list[ImageList]:
    """Return what trains, validates and tests of a domain."""
    training, test = (ImageList(*read_list(folder, f"{domain}_{part}.txt")) for part in ("train", "test"))
    if _folder_of(folder, f"{domain}_val.txt") is not None:
        held = ImageList(*read_list(folder, f"{domain}_val.txt"))
        both = set(held.paths) & set(test.paths)
        if both:
            raise ProblemError(
                f"{domain}_val.txt and {domain}_test.txt both name {min(both)}: the test list that belongs to a list "
                f"of validation images has the other half only. Remove {domain}_val.txt, or get both lists again."
            )
    else:
        rows = sample_indices(len(test.paths), len(test.paths) // 2, seed, "domainnet", domain)
        others = sorted(set(range(len(test.paths))) - set(rows))
        held, test = test._replace(rows=rows), test._replace(rows=others)
    lists = [training, held, test]
    if check_counts:
        for part, each, expected in zip(("training", "validation", "test"), lists, COUNTS[domain], strict=True):
            check_paper_count(f"DomainNet's {part} images of {domain}", len(each), 1000 * expected, TOLERANCE)
    return lists


def _held_out(images: Callable[[ImageList], Dataset[Any]], lists: Sequence[ImageList]) -> list[Dataset[Any]]:
    """Return the images of the validation and the test list; one list that both share is decoded once."""
    if lists[0].rows is None or lists[1].rows is None:
        return [images(each) for each in lists]
    shared = images(lists[0])
    return [Subset(shared, each.rows or []) for each in lists]


def read_list(folder: Path, name: str) -> tuple[list[Path], list[int]]:
    """Return the images and classes of a list; a bad line, or an image that is not there, is named."""
    lists = _folder_of(folder, name)
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


def _folder_of(folder: Path, name: str) -> Path | None:
    """Return where a list is; None if nowhere."""
    return find(folder, ("", "image_list", "txts", "splits"), [name])


def _images(images: ImageList, *, size: int, keep: str, cache: Root) -> Dataset[Any]:
    labels = torch.tensor(images.classes)
    if keep == "files":
        return ImageFiles(images.paths, labels, size=size)
    if keep != "decoded":
        raise ProblemError(f"keep must be 'decoded' or 'files', got {keep!r}.")
    return CachedImages(images.paths, labels, size=size, as_bytes=True, cache=cache, workers=2)
