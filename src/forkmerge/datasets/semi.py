"""Few labels and many images without: the splits and the recipes of semi-supervised learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from forkmerge.algorithms.forkmerge import ForkMerge, SingleTask
from forkmerge.datasets._classify import ClassificationLosses, PredictClass, Preparation, small_classifier
from forkmerge.datasets.unlabelled import ANGLES, TASKS, USUAL_SCALES, UnlabelledLosses
from forkmerge.engine.training.optimizers import OptimizerOf, SchedulerOf
from forkmerge.errors import ProblemError, check_count, unknown_name
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import Classifier, WideResNet, WithTeacher
from forkmerge.problem.definition import Evaluation, Problem, Stream
from forkmerge.problem.metrics import accuracy
from forkmerge.problem.randomness import derive

TASK = "class"
S4L = ("rotation", "exemplar")
STEPS, BATCH = 200_000, 128
Network = Literal["small", "wrn-28-2"]
METRICS = {"accuracy": accuracy, "error": replace(accuracy, complement=False, name="error")}
_RATES = {"small": 1e-3, "wrn-28-2": 5e-3}


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

    def supervised(self, batch_size: int = BATCH, metric: str = "accuracy") -> Problem:
        """Return the problem that ignores the images without labels; its one task is "class".

        Args:
            batch_size: Images per step.
            metric: "accuracy", or "error", its complement.
        """
        if metric not in METRICS:
            raise ProblemError(unknown_name("metric", metric, METRICS))
        predict, measured = PredictClass(TASK, self.preparation), METRICS[metric]
        return Problem(
            TASK,
            [Stream(self.labelled, ClassificationLosses(self.preparation), TASK, batch_size)],
            validation=Evaluation(self.validation, measured, predict=predict),
            test=Evaluation(self.test, measured, predict=predict, batch_size=256),
        )

    def problem(
        self,
        tasks: Sequence[str] = S4L,
        *,
        batch_size: int = BATCH,
        losses: UnlabelledLosses | None = None,
        metric: str = "accuracy",
    ) -> Problem:
        """Return the problem whose auxiliary tasks are learnt from the images without labels, a stream each.

        Args:
            tasks: Names of `datasets.unlabelled`.
            batch_size: Images per batch of every stream.
            losses: Their options; by default those of `UnlabelledLosses`.
            metric: "accuracy", or "error".
        """
        alone = self.supervised(batch_size, metric)
        chosen = losses or UnlabelledLosses(self.preparation)
        unknown = [task for task in tasks if task not in TASKS]
        if unknown:
            raise ProblemError(unknown_name("task without labels", unknown[0], TASKS))
        more = [Stream(self.unlabelled, chosen, task, batch_size) for task in tasks]
        return replace(alone, streams=[*alone.stream_map.values(), *more])


def supervised_recipe(data: SemiSplits, network: Network, steps: int, seed: int) -> Recipe:
    """Return supervised training on few labels with a network of a name."""
    return Recipe(
        data.supervised(),
        model=partial(make_network, network, {TASK: data.classes}),
        optimizer=OptimizerOf("Adam", lr=_rate(network)),
        steps=steps,
        algorithm=SingleTask(),
        options={"seed": seed},
    )


def semi_supervised_recipe(
    data: SemiSplits,
    auxiliaries: Sequence[str] = S4L,
    network: Network = "wrn-28-2",
    steps: int = STEPS,
    batch_size: int = BATCH,
    seed: int = 0,
    *,
    width: int = 16,
    radius: float = 6.0,
    metric: str = "accuracy",
) -> Recipe:
    """Return the paper's setting: WRN-28-2, Adam 5e-3, ×0.2 at 160K of 200K steps, a merge every 10K.

    Losses are scaled so that equal task weights are the usual ones. A teacher is part of the model, and answers when it
    is measured, whatever is learnt: so all methods are compared on equal terms.

    Args:
        data: The images.
        auxiliaries: What is learnt from those without labels: rotation and exemplar, as in S4L, or one of the other
            tasks of `datasets.unlabelled`.
        network: The paper's, or a small convolutional network for two cores.
        steps: Training steps; schedule and merges follow.
        batch_size: Images per step and task.
        seed: Draws the first weights, the order of the data and the augmentations.
        width: Channels of the small network's first layer.
        radius: ε of VAT.
        metric: "accuracy", or the "error" of the paper's table: relative changes of the two differ.
    """
    heads = {TASK: data.classes, **({"rotation": ANGLES} if "rotation" in auxiliaries else {})}
    # The evaluation that the baselines come from ramps consistency up for 200K of 500K steps.
    losses = UnlabelledLosses(data.preparation, ramp=steps * 2 // 5, radius=radius, scales=USUAL_SCALES)
    decay = SchedulerOf("MultiStepLR", milestones=["80%"], gamma=0.2)
    return Recipe(
        data.problem(auxiliaries, batch_size=batch_size, losses=losses, metric=metric),
        model=partial(make_network, network, heads, width=width, teacher=True),
        optimizer=OptimizerOf("Adam", lr=_rate(network)),
        steps=steps,
        algorithm=ForkMerge.paper(mixtures="per_auxiliary", interval=max(1, steps // 20)),
        options={"seed": seed, "scheduler": decay},
    )


def make_network(network: Network, classes: Mapping[str, int], *, width: int = 16, teacher: bool = False) -> nn.Module:
    """Return a network of a name with a head per task, and where wanted its moving average with ARML's decay, 0.95."""
    model = small_classifier(classes, width=width) if network == "small" else Classifier(WideResNet(28, 2), classes)
    return WithTeacher(model, 0.95) if teacher else model


def _rate(network: Network) -> float:
    if network not in _RATES:
        raise ProblemError(unknown_name("network", network, get_args(Network)))
    return _RATES[network]


def split(
    data: Images, labels: int | Literal["all"], validation: int, seed: int, classes: int, preparation: Preparation
) -> SemiSplits:
    """Draw the validation images from the training images, and of the others the labelled ones.

    Labels are spread evenly over the classes, as in the evaluation that the paper's setting goes back to; validation
    images are drawn from all.

    Args:
        data: All images.
        labels: How many keep their label, or "all".
        validation: How many images to validate on.
        seed: Draws both.
        classes: How many classes there are.
        preparation: From bytes to a network's input.

    References:
        Oliver et al., Realistic Evaluation of Deep Semi-Supervised Learning Algorithms, NeurIPS 2018.
    """
    size = len(data.classes)
    label_count = 1 if labels == "all" else check_count("labels", labels)
    if check_count("validation", validation) + label_count > size:
        raise ProblemError(f"{labels} labels and {validation} validation images are more than the {size} images.")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(derive(seed, "semi-supervised")))
    validation_rows, rest = order[:validation].sort().values, order[validation:]
    chosen = rest if labels == "all" else _spread(rest, data.classes, labels, classes)
    mask = torch.zeros(size, dtype=torch.bool)
    mask[rest] = True
    mask[chosen] = labels == "all"  # images without labels: all of them where all have one
    chosen = chosen.sort().values
    return SemiSplits(
        labelled=TensorDataset(data.images[chosen], data.classes[chosen]),
        unlabelled=TensorDataset(data.images[mask]),
        validation=TensorDataset(data.images[validation_rows], data.classes[validation_rows]),
        test=TensorDataset(data.test_images, data.test_classes),
        classes=classes,
        preparation=preparation,
    )


def _spread(candidates: Tensor, labels: Tensor, count: int, classes: int) -> Tensor:
    """Return `count` of the candidates, the same number of every class, one more of the first where that is odd."""
    parts = []
    for kind in range(classes):
        share = count // classes + (kind < count % classes)
        members = candidates[labels[candidates] == kind][:share]
        if len(members) < share:
            raise ProblemError(f"class {kind} has {len(members)} training images, {share} labels of it are asked for.")
        parts.append(members)
    return torch.cat(parts)
