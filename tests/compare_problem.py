"""A problem for comparisons: three tasks, two of them with validation and test data, small enough to train in no time.

Everything stands at module level, so that worker processes find it by name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import forkmerge as fm
from problems import FEATURES, TASKS, DomainLoss, Stopped, examples, plain_net, shared_losses

STEPS = 6
stop_at: list[tuple[int, int]] = []
"""Seeds and steps at which training is interrupted, once."""
test_reads: list[int] = []
"""One entry per example of the test split that was read."""


class Sealed(Dataset[Any]):
    """Counts how often the test split is read."""

    def __init__(self, seed: int) -> None:
        self.inputs, self.labels = examples(30, seed)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        test_reads.append(index)
        return self.inputs[index], self.labels[index]


def predict(model: torch.nn.Module, batch: Any, task: str) -> tuple[Tensor, Tensor]:
    inputs, labels = batch
    return model(inputs, task), labels[:, TASKS.index(task)]


def loss(predictions: Tensor, targets: Tensor) -> float:
    return cross_entropy(predictions.double(), targets).item()


def losses(model: Any, batch: Any, tasks: Any, context: fm.Context, *, seed: int, broken: int) -> dict[str, Tensor]:
    if (seed, context.step) in stop_at:
        stop_at.remove((seed, context.step))
        raise Stopped
    if seed == broken and "odd" in tasks and context.step == 3:
        raise RuntimeError("the odd task broke")
    return shared_losses(model, batch, tasks, context)


def evaluation(dataset: Dataset[Any], task: str) -> fm.Evaluation:
    metrics = {"accuracy": fm.accuracy, "loss": loss} if task == "tgt" else {"loss": loss}
    return fm.Evaluation(dataset, metrics, partial(predict, task=task), batch_size=30, higher_is_better={"loss": False})


def recipe(seed: int = 0, broken: int = -1, test: bool = True) -> fm.Recipe:
    """The problem with the data of a seed; with `broken`, all runs of that seed that train on "odd" fail."""
    stream = fm.Stream(
        TensorDataset(*examples(16, 10 + seed)), partial(losses, seed=seed, broken=broken), TASKS, batch_size=8
    )
    validation = {task: evaluation(TensorDataset(*examples(24, 2)), task) for task in ("tgt", "aux")}
    sealed = {task: evaluation(Sealed(3), task) for task in ("tgt", "aux")} if test else None
    return fm.Recipe(
        fm.Problem("tgt", {"all": stream}, validation, sealed),
        model=plain_net,
        optimizer=fm.OptimizerOf("SGD", lr=0.3, momentum=0.9),
        steps=STEPS,
        algorithm=fm.ForkMerge("mixed", interval=3, refit=True),
    )


def apart(seed: int = 0) -> fm.Recipe:
    """A stream per task; inputs of "odd" have a column more than the target's."""
    inputs, labels = examples(20, 12)
    streams = [fm.Stream(TensorDataset(*examples(20, i)), DomainLoss(t), t, 8) for i, t in enumerate(("tgt", "aux"))]
    streams.append(fm.Stream(TensorDataset(torch.cat([inputs, inputs[:, :1]], 1), labels), narrowed, "odd", 8))
    whole = recipe(seed)
    return replace(whole, problem=replace(whole.problem, streams=streams))


def narrowed(model: Any, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
    inputs, labels = batch
    return DomainLoss("odd")(model, (inputs[:, :FEATURES], labels), tasks, context)


def alone() -> fm.Recipe:
    """One task: there is nothing to compare."""
    stream = fm.Stream(TensorDataset(*examples(16, 1)), shared_losses, ("tgt",), batch_size=8)
    problem = fm.Problem("tgt", {"all": stream}, evaluation(TensorDataset(*examples(24, 2)), "tgt"))
    return fm.Recipe(problem, model=plain_net, optimizer=fm.OptimizerOf("SGD", lr=0.3), steps=STEPS)


def aimed_recipe(seed: int = 0, target: str = "tgt") -> fm.Recipe:
    """The same, of a function that could give every target data of its own."""
    made = recipe(seed)
    return replace(made, problem=made.problem.with_target(target))
