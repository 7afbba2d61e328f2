"""BatchNorm's running statistics: whose batches move them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager

from torch import Tensor, nn

BatchNorm = nn.modules.batchnorm._BatchNorm


def tracking_norms(model: nn.Module) -> list[BatchNorm]:
    """Return the layers whose running statistics follow the batches seen in training."""
    return [module for module in model.modules() if isinstance(module, BatchNorm) and module.track_running_stats]


def moved_norms(model: nn.Module, do: Callable[[], object]) -> list[BatchNorm]:
    """Return the layers whose running statistics something moves; every buffer gets its value back.

    By what was counted, and not by hooks, which a compiled model does not call.
    """
    norms, saved = tracking_norms(model), _saved(model)
    before = [_count(norm) for norm in norms]
    try:
        do()
        return [norm for norm, count in zip(norms, before, strict=True) if _count(norm) != count]
    finally:
        _restore(saved)


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
    others = _saved(model, set(map(id, norms)))
    try:
        with untracked(norms):
            yield
    finally:
        _restore(others)


_Saved = list[tuple[nn.Module, str, Tensor, Tensor]]


def _saved(model: nn.Module, excluded: Set[int] = frozenset()) -> _Saved:
    """Return every buffer with its value, apart from those of modules whose id is excluded."""
    return [
        (module, key, buffer, buffer.clone())
        for module in model.modules()
        if id(module) not in excluded
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]


def _restore(saved: _Saved) -> None:
    for module, key, buffer, value in saved:
        module._buffers[key] = buffer
        buffer.data.copy_(value)


def _count(norm: BatchNorm) -> int:
    return 0 if norm.num_batches_tracked is None else int(norm.num_batches_tracked)
