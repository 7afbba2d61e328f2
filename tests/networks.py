"""Networks counted without memory, and shaken so that nothing in them is symmetric."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def on_meta(make: Any) -> nn.Module:
    """Shapes without memory: a ViT-Base takes 350 MB."""
    with torch.device("meta"):
        return make()


def shaken(network: nn.Module) -> None:
    """Give normalisations numbers of their own, so that a mix-up shows."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.uniform_(module.bias, -0.1, 0.1)
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
