"""Segmentation, depth and surface normals: their losses and the paper's metrics.

Predictions and targets of a batch: logits [n, classes, h, w] and classes [n, h, w], −1 where unknown; depths
[n, 1, h, w], 0 where unknown; normals [n, 3, h, w], all 0 where unknown, of any length where predicted.

All metrics but the mean intersection over union and the median angle are means over pixels, which a search can race
on (`MeanCost`). All are taken over the known pixels of all images, so they do not depend on batches; so are LibMTL's,
which the authors' scripts use: its depth errors are means of batches, weighted by their known pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from forkmerge.datasets import augment
from forkmerge.problem.definition import Context, Evaluation
from forkmerge.problem.metrics import MeanCost

TASKS = ("segmentation", "depth", "normal")
IGNORED = -1  # the label of pixels without one
ANGLES = (11.25, 22.5, 30.0)
_BINS = 180_000  # of the histogram of angles, a thousandth of a degree each: all of NYUv2's test set would take 290 MB


def segmentation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over known pixels; 0 where there is none."""
    total = functional.cross_entropy(logits, labels.long(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def depth_loss(predictions: Tensor, depths: Tensor) -> Tensor:
    """Return the mean absolute error over known pixels; 0 where there is none."""
    is_known = depths != 0
    return ((predictions - depths).abs() * is_known).sum() / is_known.sum().clamp(min=1)


def normal_loss(predictions: Tensor, normals: Tensor) -> Tensor:
    """Return 1 − the mean cosine over known pixels; 0 where there is none."""
    is_known = _known_normals(normals)
    cosines = functional.cosine_similarity(predictions, normals, dim=1)
    return ((1 - cosines) * is_known).sum() / is_known.sum().clamp(min=1)


LOSSES = {"segmentation": segmentation_loss, "depth": depth_loss, "normal": normal_loss}


def outputs(model: nn.Module, images: Tensor, tasks: Sequence[str], context: Context | None = None) -> Any:
    """Return the maps of tasks, `{task: map}`; where the model allows it, its representation is declared shared."""
    if context is None or not hasattr(model, "from_features"):
        return model(images, tasks)
    model_: Any = model
    features = context.shared(model_.encoder(images))
    return model_.from_features(features, (images.shape[2], images.shape[3]), tasks)


@dataclass(frozen=True)
class PredictMap:
    """Gives (prediction, target) of one dense task from a batch of images and all targets.

    Args:
        task: The task.
        position: Where its target stands in the batch.
        features: Whether images come as features of theirs and of their mirror images, [n, 2, channels, h, w].
    """

    task: str
    position: int
    features: bool = False

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the task's map and target."""
        inputs = batch[0][:, 0].float() if self.features else batch[0]
        return outputs(model, inputs, [self.task])[self.task], batch[self.position]


@dataclass(frozen=True)
class SceneLosses:
    """Cross-entropy, L1 and cosine losses of scenes with all three targets.

    Args:
        augmented: Whether scenes are scaled, cropped and mirrored at random; features are only mirrored.
        features: Whether images come as features of theirs and of their mirror images, [n, 2, channels, h, w].
    """

    augmented: bool
    features: bool = False

    def __call__(self, model: nn.Module, batch: Any, tasks: Sequence[str], context: Context) -> dict[str, Tensor]:
        """Return the losses of the tasks asked for."""
        scenes = batch
        if self.features:
            scenes = _draw_view(batch, context.generator if self.augmented else None)
        elif self.augmented:
            scenes = augment.scale_crop_flip(batch, context.generator)
        targets = dict(zip(TASKS, scenes[1:], strict=True))
        maps = outputs(model, scenes[0], tasks, context)
        return {task: LOSSES[task](maps[task], targets[task]) for task in tasks}


def _draw_view(batch: Sequence[Tensor], generator: Generator | None) -> tuple[Tensor, ...]:
    """Return scenes as features, half of them mirrored with everything known about their pixels."""
    views, *targets = batch
    if generator is None:
        return views[:, 0].float(), *targets
    is_mirrored = torch.randint(2, (len(views),), generator=generator).to(views.device)
    drawn = views[torch.arange(len(views), device=views.device), is_mirrored].float()
    mirrored = augment.mirrored_targets(*targets)
    pairs = zip(targets, mirrored, strict=True)
    chosen = is_mirrored.bool()
    return drawn, *(torch.where(chosen.view(-1, *[1] * (one.ndim - 1)), other, one) for one, other in pairs)


def scene_evaluations(
    dataset: Dataset[Any], classes: int, batch_size: int, *, features: bool = False
) -> dict[str, Evaluation]:
    """Return the evaluations of all three tasks by the paper's metrics."""
    metrics = {
        "segmentation": segmentation_metrics(classes),
        "depth": depth_metrics(),
        "normal": normal_metrics(),
    }
    return {
        task: Evaluation(dataset, metrics[task], predict=PredictMap(task, position, features), batch_size=batch_size)
        for position, task in enumerate(TASKS, 1)
    }


def segmentation_metrics(classes: int) -> dict[str, Any]:
    """Return mean intersection over union and pixel accuracy, higher is better."""
    from torchmetrics.classification import MulticlassJaccardIndex

    return {"mIoU": MulticlassJaccardIndex(classes, ignore_index=IGNORED), "pixel_accuracy": pixel_accuracy}


def depth_metrics() -> dict[str, Any]:
    """Return absolute and relative error, lower is better."""
    return {"absolute_error": depth_error, "relative_error": relative_depth_error}


def normal_metrics() -> dict[str, Any]:
    """Return mean and median angle, lower is better, and the shares of angles below 11.25°, 22.5° and 30°."""
    shares: Mapping[str, Any] = {f"within_{angle:g}": within(angle) for angle in ANGLES}
    return {"mean_angle": mean_angle, "median_angle": MedianAngle(), **shares}


def angles(predictions: Tensor, normals: Tensor) -> Tensor:
    """Return the angles between normals in degrees, [n, h, w]; 90 where a prediction is 0, NaN where it is NaN."""
    first, second = predictions.double(), normals.double()
    # The arc tangent is exact for small angles, where the arc cosine of single-precision numbers is not.
    sine = torch.linalg.cross(first, second, dim=1).norm(dim=1)
    degrees = torch.rad2deg(torch.atan2(sine, (first * second).sum(1)))
    return torch.where((first == 0).all(1), 90.0, degrees)


class MedianAngle:
    """The median angle between predicted and true normals, to a thousandth of a degree, in bounded memory.

    Attributes:
        higher_is_better: False.
    """

    higher_is_better = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._counts = torch.zeros(_BINS, dtype=torch.long)
        self._is_broken = False

    def update(self, predictions: Tensor, normals: Tensor) -> None:
        """Add the known pixels of a batch."""
        degrees = angles(predictions, normals)[_known_normals(normals)]
        self._is_broken |= bool(degrees.isnan().any())
        bins = (degrees.nan_to_num(180.0) * (_BINS / 180)).long().clamp(0, _BINS - 1)
        self._counts += torch.bincount(bins.cpu(), minlength=_BINS)

    def compute(self) -> float:
        """Return the median, each angle taken as the middle of its bin; NaN where a prediction was."""
        total = int(self._counts.sum())
        if self._is_broken or total == 0:
            return float("nan")
        middle = torch.tensor([(total + 1) // 2, total // 2 + 1])
        bins = torch.searchsorted(self._counts.cumsum(0), middle).double()
        return float((bins + 0.5).mean()) * 180 / _BINS


def _known_normals(normals: Tensor) -> Tensor:
    return (normals != 0).any(1)  # [n, h, w]


def _summed(values: Tensor) -> Tensor:
    return values.double().flatten(1).sum(1)


def _wrong_pixels(logits: Tensor, labels: Tensor) -> Tensor:
    wrong = (logits.argmax(1) != labels) | logits.isnan().any(1)
    return _summed(wrong & (labels != IGNORED))


def _labelled_pixels(labels: Tensor) -> Tensor:
    return _summed(labels != IGNORED)


def _depth_errors(predictions: Tensor, depths: Tensor, *, relative: bool = False) -> Tensor:
    errors = (predictions.double() - depths.double()).abs()
    return _summed(torch.where(depths != 0, errors / depths.double() if relative else errors, 0.0))


def _known_depths(depths: Tensor) -> Tensor:
    return _summed(depths != 0)


def _angle_sum(predictions: Tensor, normals: Tensor) -> Tensor:
    return _summed(torch.where(_known_normals(normals), angles(predictions, normals), 0.0))


def _angles_beyond(predictions: Tensor, normals: Tensor, *, limit: float) -> Tensor:
    # `<` is false for NaN: a broken prediction is beyond every limit.
    return _summed(~(angles(predictions, normals) < limit) & _known_normals(normals))


def _known_angles(normals: Tensor) -> Tensor:
    return _summed(_known_normals(normals))


def within(limit: float) -> MeanCost:
    """Return the metric "share of pixels whose normal is less than `limit` degrees off"."""
    cost = partial(_angles_beyond, limit=limit)
    return MeanCost(cost, _known_angles, complement=True, name=f"within_{limit:g}")


pixel_accuracy = MeanCost(_wrong_pixels, _labelled_pixels, complement=True, name="pixel_accuracy")
"""Share of known pixels whose largest logit is their class."""

depth_error = MeanCost(_depth_errors, _known_depths, name="absolute_error")
"""Mean |prediction − depth| over known pixels."""

relative_depth_error = MeanCost(partial(_depth_errors, relative=True), _known_depths, name="relative_error")
"""Mean |prediction − depth| / depth over known pixels."""

mean_angle = MeanCost(_angle_sum, _known_angles, name="mean_angle")
"""Mean angle between predicted and true normals, in degrees."""
