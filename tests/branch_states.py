"""Branches at rest, as a merge finds them, without training any."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import forkmerge as fm
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from problems import SGD, noisy_net, seeded

TRAINING = fm.Training(SGD)


def make_branches(count: int, net: Callable[[], nn.Module] = noisy_net) -> tuple[ModelBinding, list[State]]:
    """A model and branches of it whose parameters and floating buffers are drawn around the model's own."""
    binding = TRAINING.binding(seeded(net))
    draw = torch.Generator().manual_seed(1)
    initial = binding.initial()
    initial.step = 7
    branches = [initial.clone() for _ in range(count)]
    for number, branch in enumerate(branches, start=1):
        for row in branch.rows.values():
            row.add_(0.1 * torch.randn(row.shape, generator=draw))
        for name, own in binding.own_buffers.items():
            noise = torch.rand(own.shape, generator=draw)
            branch.buffers[name] = own + noise if own.is_floating_point() else own + number
    return binding, branches
