"""A small problem, network and training, on which anything can be tried in a moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from forkmerge.engine.executors.state_bytes import from_wire, to_wire
from forkmerge.engine.training.branch import BranchResult, train_branch
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.engine.training.options import Mixture, Training
from forkmerge.engine.training.state import State
from forkmerge.methods import Method
from forkmerge.problem.definition import Context, Evaluation, Problem, Stream
from forkmerge.problem.metrics import accuracy
from forkmerge.problem.randomness import random_state_kept

TASKS = ("target", "helpful", "noise")


class SmallNet(nn.Module):
    """An encoder with BatchNorm and dropout, and a linear head per task."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 6))
        self.heads = nn.ModuleDict({task: nn.Linear(6, 3) for task in TASKS})

    def forward(self, x: Tensor, task: str = "target") -> Tensor:
        """Return a task's logits."""
        logits: Tensor = self.heads[task](self.encoder(x))
        return logits


@dataclass(frozen=True)
class SmallLosses:
    """Cross-entropies with something odd about one of them, if asked for.

    Args:
        declared: Whether the representation is declared with `context.shared`.
        missing: Whether labels come and go: two, one and three tasks in turn.
        odd: The task that is odd.
        how: "zero" (no gradient), "nan" (no finite loss) or "poison" (a finite loss without a finite gradient).
        since: The first odd step.
    """

    declared: bool = False
    missing: bool = False
    odd: str = ""
    how: str = ""
    since: int = 0

    def __call__(self, model: nn.Module, batch: Any, tasks: Sequence[str], context: Context) -> Mapping[str, Tensor]:
        """Return the losses asked for."""
        x, labels = batch
        encoder, heads = model.get_submodule("encoder"), model.get_submodule("heads")
        z = context.shared(encoder(x)) if self.declared else encoder(x)
        losses = {}
        for task in tasks:
            if self.missing and task in TASKS[: (0, 2, 1)[context.step % 3]]:
                continue
            loss = cross_entropy(heads.get_submodule(task)(z), labels[:, TASKS.index(task)])
            losses[task] = self._made_odd(loss) if task == self.odd and context.step >= self.since else loss
        return losses

    def _made_odd(self, loss: Tensor) -> Tensor:
        if self.how == "zero":
            return loss * 0.0
        if self.how == "nan":
            return loss * torch.nan
        poisoned: Tensor = Poison.apply(loss)  # type: ignore[no-untyped-call]
        return poisoned


class Poison(torch.autograd.Function):
    """The identity, with a gradient of NaN."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: D102
        del ctx
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: D102
        del ctx
        return gradient * torch.nan


def small_problem(*, own_inputs: bool = False, **oddities: Any) -> Problem:
    """Return a problem of three tasks that share a stream, or have one each.

    Args:
        own_inputs: Whether every task reads its own batch.
        oddities: Options of `SmallLosses`.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 5, generator=generator)
    rule = torch.randn(5, 3, generator=generator)
    noisy = x @ rule + 0.7 * torch.randn(48, 3, generator=generator)
    columns = [noisy.argmax(1), (x @ rule).argmax(1), torch.randint(3, (48,), generator=generator)]
    labels = torch.stack(columns, 1)
    training, held_out = TensorDataset(x[:32], labels[:32]), TensorDataset(x[32:], labels[32:, 0])
    as_training = TensorDataset(x[32:], labels[32:])
    groups: list[tuple[str, ...]] = [(task,) for task in TASKS] if own_inputs else [TASKS]
    streams = [Stream(training, SmallLosses(**oddities), tasks, batch_size=8) for tasks in groups]
    return Problem("target", streams, Evaluation(held_out, accuracy, as_training=as_training))


def train_small(
    method: Method | None,
    problem: Problem | None = None,
    *,
    cuts: Sequence[int] = (0, 5),
    weights: Mapping[str, float] | None = None,
    optimizer: OptimizerOf | None = None,
    state: State | None = None,
    **options: Any,
) -> BranchResult:
    """Train a `SmallNet` with a method, in segments; between two of them the state becomes bytes and is read again.

    Args:
        method: The method; None sums the losses.
        problem: What to train on; None is `small_problem()`.
        cuts: The steps at which segments begin and end.
        weights: Task weights; None is 1 each.
        optimizer: None is SGD with momentum and weight decay.
        state: Where to start, changed in place; None is a new network.
        options: Further options of `Training`.
    """
    mixture = Mixture("branch", dict.fromkeys(TASKS, 1.0) if weights is None else weights)
    rule = optimizer or OptimizerOf("SGD", lr=0.05, momentum=0.9, weight_decay=1e-3)
    training = Training(optimizer=rule, method=method, **options)
    used = problem or small_problem()
    result: BranchResult | None = None
    for start, end in pairwise(cuts):
        with random_state_kept():
            torch.manual_seed(1)
            binding = training.binding(SmallNet())
        if result is not None:
            state = from_wire(to_wire(result.state))
        state = binding.initial() if state is None else binding.place(state)
        new = train_branch(binding, used, mixture, state, steps=end - start, training=training, seed=3)
        for what, counts in (result.reports if result else {}).items():
            for task, count in counts.items():
                new.reports.setdefault(what, {})[task] = new.reports.get(what, {}).get(task, 0) + count
        result = new
    assert result is not None
    return result


def same_state(one: State, other: State) -> bool:
    """Whether two states have the same bits, the method's own state included."""
    (left, a), (right, b) = to_wire(one), to_wire(other)
    return bool(left == right and a == b)
