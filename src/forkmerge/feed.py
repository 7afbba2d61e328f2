"""From a data set to the batch of a step, in this process or in loader workers, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from forkmerge.order import batch_indices, derive, set_random_state
from forkmerge.problem import Evaluation, Stream


def is_tensors(source: Stream | Evaluation) -> bool:
    """Whether batches can be cut out of tensors by one indexed read, with no code of the user's per example."""
    return type(source.dataset) is TensorDataset and source.collate_fn is None


def read_tensors(source: Stream | Evaluation, indices: Tensor) -> list[Tensor]:
    """Return the batch of the given examples of a `TensorDataset`."""
    tensors: tuple[Tensor, ...] = source.dataset.tensors  # type: ignore[attr-defined]
    return [tensor[indices] for tensor in tensors]


def read_examples(source: Stream | Evaluation, indices: list[int], seed: int) -> Any:
    """Return the batch of the given examples.

    Each example, and the collate function, is read under its own global random state derived from `seed`, so
    augmentations may draw from torch, numpy or `random` and give the same bits in any process.
    """
    examples = []
    for place, index in enumerate(indices):
        set_random_state(derive(seed, "example", place))
        examples.append(source.dataset[index])
    set_random_state(derive(seed, "collate"))
    return (source.collate_fn or default_collate)(examples)


class _Batches(Dataset[Any]):
    """The endless stream as a data set whose items are whole batches, addressed by position."""

    def __init__(self, name: str, stream: Stream, seed: int) -> None:
        self.name, self.stream, self.seed = name, stream, seed

    def __getitem__(self, position: int) -> Any:
        stream = self.stream
        size = len(stream.dataset)  # type: ignore[arg-type]  # checked by Problem
        indices = batch_indices(size, stream.batch_size, position, self.seed, self.name)
        if is_tensors(stream):
            return read_tensors(stream, indices)
        return read_examples(stream, indices.tolist(), derive(self.seed, self.name, "batch", position))


def batches(name: str, stream: Stream, positions: range | list[int], seed: int, workers: int = 0) -> Iterator[Any]:
    """Yield the batches at the given positions of a stream.

    Tensors that need no per-example code are read here whatever `workers` says: a worker would only add copies.
    """
    source = _Batches(name, stream, seed)
    if workers == 0 or is_tensors(stream):
        return (source[position] for position in positions)
    loader = DataLoader(
        source,
        batch_size=None,  # items are whole batches already
        sampler=positions,
        num_workers=workers,
        generator=torch.Generator().manual_seed(seed),  # otherwise the loader draws from the global state
        collate_fn=_identity,
    )
    return iter(loader)


def _identity(batch: Any) -> Any:
    return batch


def move(batch: Any, device: torch.device) -> Any:
    """Move every tensor in nested lists, tuples and mappings (and anything with `.to`) to a device."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True) if isinstance(batch, torch.Tensor) else batch.to(device)
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device) for value in batch)
    return batch
