"""Auxiliary tasks made from others, or from nothing but the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forkmerge.errors import ProblemError, check_name, unknown_name
from forkmerge.problem.definition import Context, Losses, Problem, Stream


def with_l2(problem: Problem, name: str = "l2") -> Problem:
    """Return the problem with L2 regularisation as one more auxiliary task: L = ½‖θ‖² over all trainable parameters.

    Its gradient is θ, so with plain gradient descent a task weight of λ is a weight decay of λ. No data is read for it.
    It reaches every parameter, so to gradient methods all parameters are shared while it takes part.

    Args:
        problem: Any problem.
        name: How the new task is called.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> import forkmerge as fm
        >>> data = TensorDataset(torch.zeros(2, 1), torch.zeros(2).long())
        >>> stream = fm.Stream(data, lambda model, batch, tasks, context: {}, "digits", batch_size=2)
        >>> with_l2(fm.Problem("digits", [stream], fm.Evaluation(data, fm.accuracy))).tasks
        ('digits', 'l2')

    References:
        Jiang et al., ForkMerge, NeurIPS 2023, Section 3.1.
    """
    _check_new(problem, name)
    stream = Stream(TensorDataset(torch.zeros(1)), _half_square_norm, name, batch_size=1)
    return replace(problem, streams={**problem.stream_map, _stream_name(problem, name): stream})


def merge_auxiliaries(
    problem: Problem, name: str, tasks: Sequence[str], weights: Mapping[str, float] | None = None
) -> Problem:
    """Return the problem with several auxiliary tasks replaced by one, whose loss is Σ_k w_k L_k.

    The tasks may share a stream or have their own; a step of the new task reads all of them. Where a batch has labels
    for some of the tasks only, the loss is the sum over these.

    Args:
        problem: Any problem.
        name: How the new task is called.
        tasks: The auxiliaries it is made of; they are no tasks of the new problem.
        weights: w; None is 1 each where task weights multiply losses, and 1/n each where they are sampling weights.

    References:
        Jiang et al., ForkMerge, NeurIPS 2023, Section 3, where all other domains are one auxiliary.
    """
    tasks = tuple(dict.fromkeys(tasks))
    for task in tasks:
        if task == problem.target:
            raise ProblemError(f"the target {task!r} cannot be merged into an auxiliary.")
        if task not in problem.tasks:
            raise ProblemError("merge_auxiliaries: " + unknown_name("task", task, problem.auxiliaries))
    if not tasks:
        raise ProblemError("merge_auxiliaries needs at least one task.")
    if name not in tasks:
        _check_new(problem, name)
    shares = _shares(problem, tasks, weights)
    streams = {key: _merged(stream, name, shares) for key, stream in problem.stream_map.items()}
    validation, test = (
        {task: value for task, value in evaluations.items() if task not in tasks}
        for evaluations in (problem.evaluations("validation"), problem.evaluations("test"))
    )
    return replace(problem, streams=streams, validation=validation, test=test)


@dataclass(frozen=True)
class MergedLosses:
    """The losses of a stream some of whose tasks are one.

    Args:
        losses: The stream's own.
        name: The task that stands for others.
        shares: The others' weights.
    """

    losses: Losses
    name: str
    shares: Mapping[str, float]

    def __call__(self, model: nn.Module, batch: Any, tasks: Sequence[str], context: Context) -> dict[str, Tensor]:
        """Ask the stream for the tasks behind the names, and sum those that are one."""
        names = [task for task in tasks if task != self.name]
        if self.name in tasks:
            names += [task for task, share in self.shares.items() if share > 0]
        losses = self.losses(model, batch, names, context)
        result: dict[str, Tensor] = {}
        for task, loss in losses.items():
            if loss is None:
                continue
            if task not in self.shares:
                result[task] = loss
                continue
            part = loss * self.shares[task]
            result[self.name] = result[self.name] + part if self.name in result else part
        return result


def _merged(stream: Stream, name: str, shares: Mapping[str, float]) -> Stream:
    inside = {task: shares[task] for task in stream.tasks if task in shares}
    if not inside:
        return stream
    tasks = dict.fromkeys(name if task in inside else task for task in stream.tasks)
    return replace(stream, losses=MergedLosses(stream.losses, name, inside), tasks=tuple(tasks))


def _shares(problem: Problem, tasks: Sequence[str], weights: Mapping[str, float] | None) -> dict[str, float]:
    if weights is None:
        return dict.fromkeys(tasks, 1.0 if problem.weights == "loss" else 1.0 / len(tasks))
    for task in weights:
        if task not in tasks:
            raise ProblemError("weights: " + unknown_name("merged task", task, tasks))
    shares = {task: float(weights.get(task, 1.0)) for task in tasks}
    for task, share in shares.items():
        if not (math.isfinite(share) and share >= 0):
            raise ProblemError(f"the weight of {task!r} must be a finite number ≥ 0, got {share!r}.")
    if not any(shares.values()):
        raise ProblemError("merge_auxiliaries: every weight is 0, so the merged task would train nothing.")
    return shares


def _half_square_norm(model: nn.Module, batch: Any, tasks: Sequence[str], context: Context) -> dict[str, Tensor | None]:
    del batch, context
    squares = [p.square().sum() for p in model.parameters() if p.requires_grad]
    return {tasks[0]: 0.5 * torch.stack([s.to(squares[0]) for s in squares]).sum()}


def _check_new(problem: Problem, name: str) -> None:
    check_name("task", name)
    if name in problem.tasks:
        raise ProblemError(f"the problem already has a task {name!r}: choose another name.")


def _stream_name(problem: Problem, name: str) -> str:
    while name in problem.stream_map:
        name += "_"
    return name
