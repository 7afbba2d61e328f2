"""Few labels and many images without: the splits of semi-supervised learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import forkmerge as fm
from forkmerge.datasets._classify import ClassificationLosses, PredictClass, Preparation
from forkmerge.datasets.unlabelled import TASKS, UnlabelledLosses
from forkmerge.errors import unknown_name
from forkmerge.order import derive

TASK = "class"


class Images(NamedTuple):
    """Bytes [n, 3, h, w] and classes [n], of training and test."""

    images: Tensor
    classes: Tensor
    test_images: Tensor
    test_classes: Tensor


@dataclass(frozen=True)
class SemiSplits:
    """The parts of a data set with few labels; images are bytes [3, h, w].

    Args:
        labelled: (image, class) for training.
        unlabelled: (image,) for training, none of which is labelled.
        validation: (image, class).
        test: (image, class).
        classes: How many classes there are.
        preparation: From bytes to a network's input.
    """

    labelled: Dataset[Any]
    unlabelled: Dataset[Any]
    validation: Dataset[Any]
    test: Dataset[Any]
    classes: int
    preparation: Preparation

    def supervised(self, batch_size: int = 128) -> fm.Problem:
        """Return the problem that ignores the images without labels; its one task is "class"."""
        predict = PredictClass(TASK, self.preparation)
        return fm.Problem(
            TASK,
            [fm.Stream(self.labelled, ClassificationLosses(self.preparation), TASK, batch_size)],
            validation=fm.Evaluation(self.validation, fm.accuracy, predict=predict),
            test=fm.Evaluation(self.test, fm.accuracy, predict=predict, batch_size=256),
        )

    def problem(
        self,
        tasks: Sequence[str] = ("rotation", "exemplar"),
        *,
        batch_size: int = 128,
        losses: UnlabelledLosses | None = None,
    ) -> fm.Problem:
        """Return the problem whose auxiliary tasks are learnt from the images without labels, a stream each.

        Args:
            tasks: Names of `datasets.unlabelled`.
            batch_size: Images per batch of every stream.
            losses: Their options; by default those of `UnlabelledLosses`.
        """
        alone = self.supervised(batch_size)
        chosen = losses or UnlabelledLosses(self.preparation)
        unknown = [task for task in tasks if task not in TASKS]
        if unknown:
            raise fm.ProblemError(unknown_name("task without labels", unknown[0], TASKS))
        more = [fm.Stream(self.unlabelled, chosen, task, batch_size) for task in tasks]
        return replace(alone, streams=[*alone.stream_map.values(), *more])


def split(
    data: Images, labels: int | None, validation: int, seed: int, classes: int, preparation: Preparation
) -> SemiSplits:
    """Draw the validation images from the training images, and of the others the labelled ones.

    Labels are spread evenly over the classes, as in the evaluation that the paper's setting goes back to; validation
    images are drawn from all.

    Args:
        data: All images.
        labels: How many keep their label; None for all.
        validation: How many images to validate on.
        seed: Draws both.
        classes: How many classes there are.
        preparation: From bytes to a network's input.

    References:
        Oliver et al., Realistic Evaluation of Deep Semi-Supervised Learning Algorithms, NeurIPS 2018.
    """
    size = len(data.classes)
    for name, value in (("labels", labels), ("validation", validation)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise fm.ProblemError(f"{name} must be a positive integer, got {value!r}.")
    if validation + (labels or 1) > size:
        raise fm.ProblemError(f"{labels} labels and {validation} validation images are more than the {size} images.")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(derive(seed, "semi-supervised")))
    held, rest = order[:validation].sort().values, order[validation:]
    chosen = rest if labels is None else _spread(rest, data.classes, labels, classes)
    mask = torch.zeros(size, dtype=torch.bool)
    mask[rest] = True
    mask[chosen] = labels is None  # images without labels: all of them where all have one
    chosen = chosen.sort().values
    return SemiSplits(
        labelled=TensorDataset(data.images[chosen], data.classes[chosen]),
        unlabelled=TensorDataset(data.images[mask]),
        validation=TensorDataset(data.images[held], data.classes[held]),
        test=TensorDataset(data.test_images, data.test_classes),
        classes=classes,
        preparation=preparation,
    )


def _spread(candidates: Tensor, labels: Tensor, count: int, classes: int) -> Tensor:
    """Return `count` of the candidates, the same number of every class, one more of the first where that is odd."""
    parts = []
    for kind in range(classes):
        wanted = count // classes + (kind < count % classes)
        found = candidates[labels[candidates] == kind][:wanted]
        if len(found) < wanted:
            raise fm.ProblemError(
                f"class {kind} has {len(found)} training images, {wanted} labels of it are asked for."
            )
        parts.append(found)
    return torch.cat(parts)
