"""BatchNorm's running statistics: whose batches move them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm


def tracking_norms(model: nn.Module) -> list[BatchNorm]:
    """Return the layers whose running statistics follow the batches seen in training."""
    return [module for module in model.modules() if isinstance(module, BatchNorm) and module.track_running_stats]


@contextmanager
def untracked(norms: Sequence[BatchNorm]) -> Iterator[None]:
    """Let layers use a batch's own statistics, as always in training, and forget them."""
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


@contextmanager
def statistics_frozen(model: nn.Module) -> Iterator[None]:
    """Let BatchNorm use the batch's statistics, as in training, and give every buffer its value back."""
    norms = [norm for norm in tracking_norms(model) if norm.training]
    known = set(map(id, norms))
    others: list[tuple[nn.Module, str, Tensor, Tensor]] = []
    for module in model.modules():
        if id(module) not in known:
            others += [(module, key, b, b.clone()) for key, b in module._buffers.items() if b is not None]
    try:
        with untracked(norms):
            yield
    finally:
        for module, key, buffer, value in others:
            module._buffers[key] = buffer
            buffer.data.copy_(value)
