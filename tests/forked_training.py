"""A training loop as anybody would write it around a fork."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import forkmerge as fm
from _asserts import bits
from problems import examples, minus_loss, predict_target, shared_losses

BRANCHES = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "odd": 0.5}}
CONTEXT = fm.Context(0, 0)
INPUTS, LABELS = examples(16, 1)
HELD_OUT = examples(24, 2)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, **{"lr": 0.3, "momentum": 0.9, **options})


def step(branch: Any, batch: Any = (INPUTS, LABELS)) -> None:
    """One step as anybody would write it."""
    branch.model.train()
    losses = shared_losses(branch.model, batch, list(branch.task_weights), CONTEXT)
    total = sum(weight * losses[task] for task, weight in branch.task_weights.items())
    branch.optimizer.zero_grad()
    total.backward()
    branch.optimizer.step()
    if branch.scheduler is not None:
        branch.scheduler.step()


def score(model: nn.Module) -> float:
    return minus_loss(*predict_target(model, HELD_OUT))


def train(forked: fm.Fork, steps: int = 3, dropout: bool = False) -> None:
    for branch in forked:
        for index in range(steps):
            if dropout:
                torch.manual_seed(index)
            step(branch)


def branch_bits(forked: fm.Fork) -> dict[str, Any]:
    return {branch.name: bits(branch.model) for branch in forked}
