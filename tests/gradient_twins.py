"""Training with per-task gradients by an explicit loop over tasks, and methods to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.engine.training.branch import BranchResult, train_branch
from forkmerge.methods import Array, GramianMethod, MatrixMethod, MethodState, View
from forkmerge.problem import example_order, randomness
from problems import SGD, TASKS, WIDTH, Net, evaluation, examples

ONES = dict.fromkeys(TASKS, 1.0)


def odd_weights(gramian: Array) -> Array:
    result: Array = np.tanh(gramian.sum(1)) + np.arange(1, len(gramian) + 1)
    return result


@dataclass(frozen=True)
class Odd(GramianMethod):
    """Weights that depend on every entry of the Gramian in a way nobody could get right by chance."""

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        return odd_weights(gramian)


@dataclass(frozen=True)
class OddWithHeads(Odd):
    weighs_heads = True


@dataclass(frozen=True)
class OddMatrix(MatrixMethod):
    def direction(self, matrix: Tensor, view: View, state: MethodState) -> Tensor:
        weights = odd_weights((matrix @ matrix.T).double().numpy())
        return torch.tensor(weights, dtype=matrix.dtype) @ matrix


@dataclass(frozen=True)
class Sum(GramianMethod):
    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        return np.ones(len(gramian))


def doubled(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().double()


def split_net() -> nn.Module:
    """Two encoders, the second on top of the first."""
    net = Net(nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh()))
    net.upper = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return net


def double_data(count: int = 16, seed: int = 1) -> TensorDataset:
    inputs, labels = examples(count, seed)
    return TensorDataset(inputs.double(), labels)


def declared_losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
    inputs, labels = batch
    features = context.shared(model.body(inputs))
    return {task: cross_entropy(model.heads[task](features), labels[:, TASKS.index(task)]) for task in tasks}


def double_problem(losses: Any, data: TensorDataset | None = None, tasks: Sequence[str] = TASKS) -> fm.Problem:
    return fm.Problem("tgt", {"all": fm.Stream(data or double_data(), losses, tasks, 8)}, evaluation())


def train_with(
    net: nn.Module, problem: fm.Problem, method: Any, steps: int = 4, weights: Any = None, **options: Any
) -> BranchResult:
    training = fm.Training(**{"optimizer": SGD, "method": method, **options})
    binding = training.binding(net)
    mixture = fm.Mixture("branch", weights or ONES)
    result = train_branch(binding, problem, mixture, binding.initial(), steps=steps, training=training, seed=0)
    binding.attach_weights(result.state)
    return result


def explicit(
    net: Any,
    steps: int = 4,
    *,
    tasks: Sequence[str] = TASKS,
    weights: Any = None,
    accumulate: int = 1,
    heads: bool = False,
    streams: bool = False,
    present: Callable[[int], Sequence[str]] = lambda step: TASKS,
    shared: Sequence[str] = ("body",),
) -> nn.Module:
    """The same training as anybody would write it: one full backward pass per task and micro-batch, no library."""
    used = SGD(net)
    net.train()
    for step in range(steps):
        now = [task for task in tasks if task in present(step)]
        grads: dict[str, dict[str, Tensor]] = {}
        for task in now:
            net.zero_grad(set_to_none=True)
            for micro in range(accumulate):
                position = step * accumulate + micro
                index, name = TASKS.index(task), task if streams else "all"
                count, seed = (20 + 10 * index, 10 + index) if streams else (16, 1)
                inputs, labels = examples(count, seed)
                chosen = example_order.batch_indices(count, 8, position, 0, name)
                randomness.set_random_state(randomness.derive(0, name, "forward", position))
                logits = net.heads[task](net.body(inputs[chosen].to(next(net.parameters()).dtype)))
                loss = cross_entropy(logits, labels[chosen, index]) * (weights or ONES)[task] / accumulate
                loss.backward()
            grads[task] = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        rows = torch.stack(
            [
                torch.cat([g[n].flatten() for n, p in net.named_parameters() if n.split(".")[0] in shared and n in g])
                for g in grads.values()
            ]
        )
        factors = odd_weights((rows @ rows.T).double().numpy())
        for n, p in net.named_parameters():
            is_shared = n.split(".")[0] in shared
            terms = [(g[n], w) for g, w in zip(grads.values(), factors, strict=True) if n in g]
            p.grad = None
            if terms:
                p.grad = sum(g * (float(w) if is_shared or heads else 1.0) for g, w in terms)
        used.step()
    return net
