"""Yes-or-no tasks on codes and numbers: losses, predictions, and the area under the ROC curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from forkmerge.problem import Context, Evaluation, Stream


@dataclass(frozen=True)
class ClickLosses:
    """The binary cross-entropy of every task of a stream; batches are codes, numbers and labels [n, tasks].

    Args:
        tasks: The tasks in the order of the labels.
    """

    tasks: tuple[str, ...]

    def __call__(self, model: nn.Module, batch: Any, tasks: Sequence[str], context: Context) -> dict[str, Tensor]:
        """Return the losses asked for; where the model allows it, its representation is declared shared."""
        codes, numbers, labels = batch
        model_: Any = model
        if hasattr(model, "from_features"):
            found = model_.from_features(context.shared(model_.encoder(codes, numbers)), tasks)
        else:
            found = model(codes, numbers, tasks)
        loss = functional.binary_cross_entropy_with_logits
        return {task: loss(found[task], labels[:, self.tasks.index(task)]) for task in tasks}


@dataclass(frozen=True)
class PredictClick:
    """Gives (probabilities, labels) of a task.

    Args:
        task: The task.
        place: Its column among the labels.
    """

    task: str
    place: int

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return probabilities, which torchmetrics takes as they are, and labels as integers."""
        codes, numbers, labels = batch
        return model(codes, numbers, [self.task])[self.task].sigmoid(), labels[:, self.place].long()


def click_stream(dataset: Any, tasks: Sequence[str], batch_size: int) -> Stream:
    """Return a stream that serves tasks on the same rows."""
    return Stream(dataset, ClickLosses(tuple(tasks)), tasks, batch_size)


def click_evaluations(dataset: Any, tasks: Sequence[str], batch_size: int = 4096) -> dict[str, Evaluation]:
    """Return the evaluation of each task on the same rows, by the area under the ROC curve."""
    from torchmetrics.classification import BinaryAUROC

    return {
        task: Evaluation(dataset, {"AUC": BinaryAUROC()}, predict=PredictClick(task, place), batch_size=batch_size)
        for place, task in enumerate(tasks)
    }
