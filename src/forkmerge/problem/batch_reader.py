"""Whole batches by one indexed read, for data sets that need no code of the user's per example.

Known are torch's own `TensorDataset`, and `Subset`, `ConcatDataset` and `StackDataset` of readable ones. Any other
data set joins them by a method

    read_batch(indices: Tensor) -> batch

which gets the examples' positions, a tensor [n] of integers on the CPU, and returns what collating these examples
would give. It must draw no random numbers, since it may be called by another thread while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from forkmerge.errors import ProblemError
from forkmerge.problem.definition import Evaluation, Stream
from forkmerge.problem.split_dataset import size_of


@dataclass(frozen=True)
class Reader:
    """How a data set is read in whole batches.

    Args:
        read: From the positions of examples, [n], to their batch.
        devices: Where the tensors are that it reads; None for a `read_batch`, which may wait for a disk.
    """

    read: Callable[[Tensor], Any]
    devices: frozenset[torch.device | None]

    def is_worth_a_thread(self, device: torch.device) -> bool:
        """Whether batches for `device` are read ahead: a fixed rule, never a measurement.

        Cutting a batch out of tensors that are where the model is takes less time than handing it over.
        """
        return self.devices != {device}


def reader_of(source: Stream | Evaluation) -> Reader | None:
    """Return how whole batches are read; None where examples must be read one by one."""
    return _reader(source.dataset) if source.collate_fn is None else None


def _reader(dataset: Any) -> Reader | None:
    # By exact type: a subclass may have an `__getitem__` of its own, which must not be passed over.
    kind = type(dataset)
    if kind is TensorDataset:
        return _columns([_reader_of_tensor(tensor) for tensor in dataset.tensors])
    if kind is Subset:
        inner = _reader(dataset.dataset)
        return inner and Reader(partial(_read_subset, dataset, inner), inner.devices)
    if kind is ConcatDataset:
        return _concatenated([_reader(member) for member in dataset.datasets], dataset.cumulative_sizes)
    if kind is StackDataset:
        members = dataset.datasets
        if isinstance(members, Mapping):
            return _columns([_member(member) for member in members.values()], list(members))
        return _columns([_member(member) for member in members])
    return Reader(dataset.read_batch, frozenset({None})) if reads_batches(dataset) else None


def reads_batches(dataset: Any) -> bool:
    """Whether a data set has a `read_batch` that speaks for its `__getitem__`.

    A subclass that overrides `__getitem__` alone is read example by example.
    """
    for kind in type(dataset).__mro__:
        if "read_batch" in vars(kind):
            return True
        if "__getitem__" in vars(kind):
            return False
    return False


def _member(member: Any) -> Reader | None:
    return _reader_of_tensor(member) if type(member) is Tensor else _reader(member)


def _reader_of_tensor(tensor: Tensor) -> Reader:
    return Reader(partial(_take, tensor), frozenset({tensor.device}))


def _take(tensor: Tensor, indices: Tensor) -> Tensor:
    # Several times faster than `tensor[indices]` where examples have more than one dimension.
    return tensor.index_select(0, indices.to(tensor.device, non_blocking=True))


def _columns(readers: Sequence[Reader | None], keys: Sequence[str] | None = None) -> Reader | None:
    members = [reader for reader in readers if reader is not None]
    if len(members) < len(readers):
        return None
    reads = [reader.read for reader in members]
    devices = frozenset().union(*(reader.devices for reader in members))
    if keys is None:
        return Reader(lambda indices: [read(indices) for read in reads], devices)
    return Reader(lambda indices: {key: read(indices) for key, read in zip(keys, reads, strict=True)}, devices)


def _read_subset(subset: Subset[Any], inner: Reader, indices: Tensor) -> Any:
    # The list is looked up for every batch: turned into a tensor once, it could grow stale, and takes longer.
    chosen: Any = subset.indices
    if isinstance(chosen, Tensor):
        picked = chosen.cpu()[indices]
    elif isinstance(chosen, np.ndarray):
        picked = torch.from_numpy(chosen[indices.numpy()])
    else:
        picked = torch.tensor([int(chosen[index]) for index in indices.tolist()])
    return inner.read(torch.where(picked < 0, picked + size_of(subset.dataset), picked))


def _concatenated(readers: Sequence[Reader | None], ends: Sequence[int]) -> Reader | None:
    members = [reader for reader in readers if reader is not None]
    if len(members) < len(readers):
        return None
    starts, bounds = [0, *ends], torch.tensor(ends)

    def read(indices: Tensor) -> Any:
        member = torch.bucketize(indices, bounds, right=True)
        positions, parts = [], []
        for number in member.unique().tolist():
            (at,) = torch.where(member == number)
            positions.append(at)
            parts.append(members[number].read(indices[at] - starts[number]))
        return parts[0] if len(parts) == 1 else _joined(parts, torch.cat(positions).argsort())

    return Reader(read, frozenset().union(*(reader.devices for reader in members)))


def _joined(parts: list[Any], order: Tensor) -> Any:
    """Concatenate parts of a batch, column by column, and put the examples in order."""
    first = parts[0]
    if all(isinstance(part, Tensor) for part in parts):
        return _take(torch.cat(parts), order)
    if all(isinstance(part, Mapping) and part.keys() == first.keys() for part in parts):
        return {key: _joined([part[key] for part in parts], order) for key in first}
    if all(isinstance(part, list | tuple) and len(part) == len(first) for part in parts):
        return [_joined(list(columns), order) for columns in zip(*parts, strict=True)]
    forms = sorted({_form(part) for part in parts})
    raise ProblemError(
        f"the data sets joined in a ConcatDataset give batches of different form: {', '.join(forms)}. "
        "Give them the same columns, each a tensor."
    )


def _form(part: Any) -> str:
    if isinstance(part, Mapping):
        return "{" + ", ".join(map(str, part)) + "}"
    return f"{len(part)} columns" if isinstance(part, list | tuple) else type(part).__name__
