"""Yes-or-no tasks on codes and numbers: losses, predictions, and the area under the ROC curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from forkmerge.datasets._files import Array
from forkmerge.errors import ProblemError
from forkmerge.problem.auc import auc
from forkmerge.problem.definition import Context, Evaluation, Stream
from forkmerge.problem.randomness import derive

_TRIES = 100  # redraws of items that are known to be chosen; each leaves few of them


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
            logits = model_.from_features(context.shared(model_.encoder(codes, numbers)), tasks)
        else:
            logits = model(codes, numbers, tasks)
        loss = functional.binary_cross_entropy_with_logits
        return {task: loss(logits[task], labels[:, self.tasks.index(task)]) for task in tasks}


@dataclass(frozen=True)
class PredictClick:
    """Gives (logits, labels) of a task.

    Args:
        task: The task.
        column: Its column among the labels.
    """

    task: str
    column: int

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits, and labels as integers."""
        codes, numbers, labels = batch
        return model(codes, numbers, [self.task])[self.task], labels[:, self.column].long()


def click_stream(dataset: Any, tasks: Sequence[str], batch_size: int) -> Stream:
    """Return a stream that serves tasks on the same rows."""
    return Stream(dataset, ClickLosses(tuple(tasks)), tasks, batch_size)


def click_evaluations(dataset: Any, tasks: Sequence[str], batch_size: int = 4096) -> dict[str, Evaluation]:
    """Return the evaluation of each task on the same rows, by the area under the ROC curve."""
    return {
        task: Evaluation(dataset, {"AUC": auc}, predict=PredictClick(task, column), batch_size=batch_size)
        for column, task in enumerate(tasks)
    }


def click_rows(codes: Array, labels: Array, numbers: Array | None = None) -> TensorDataset:
    """Return rows of codes, numbers and labels as a data set; there may be no numbers."""
    columns = np.zeros((len(codes), 0), np.float32) if numbers is None else numbers.astype(np.float32)
    return TensorDataset(
        torch.from_numpy(codes.astype(np.int64)), torch.from_numpy(columns), torch.from_numpy(labels.astype(np.float32))
    )


def draw_others(users: Array, chosen: Array, items: int, count: int, *seed: object) -> tuple[Array, Array]:
    """Return `count` items per entry of `users` that the user is not known to have chosen, drawn uniformly.

    Args:
        users: Whom to draw for.
        chosen: All known pairs, as user · items + item.
        items: How many there are.
        count: How many to draw for each.
        *seed: What the draw depends on.

    Returns:
        The users, each `count` times, and the items.
    """
    rng = np.random.default_rng([derive(0, *seed)])
    repeated = np.repeat(users.astype(np.int64), count)
    drawn = rng.integers(0, items, len(repeated))
    pairs = np.unique(chosen)
    for _ in range(_TRIES):
        (again,) = np.nonzero(np.isin(repeated * items + drawn, pairs))
        if len(again) == 0:
            return repeated, drawn
        drawn[again] = rng.integers(0, items, len(again))
    raise ProblemError(f"some users have chosen nearly all of the {items} items: no others can be drawn for them.")
