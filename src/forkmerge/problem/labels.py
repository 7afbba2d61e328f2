"""Labels that no class is for, or that are text: the examples to look at before training, the one to blame, advice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

MISSING = -100
"""Torch's own mark of a missing label."""

CLASSES = "classes count from 0, and the head needs one output for each; mark missing labels by -100"
"""What to do where there is no class for a label."""

_WRONG_TYPE = re.compile(r"expected (?:scalar type|target dtype to be) Long\b.* (?:found|got) (\w+)", re.IGNORECASE)
_NO_TENSOR = re.compile(
    r"must be Tensor, not (tuple|list|str)|'(tuple|list|str)' object has no attribute|unsupported operand type|"
    r"(tuple|list|string) indices must be integers|invalid data type 'str'|too many dimensions 'str'"
)
_OUT_OF_RANGE = re.compile(r"Target (-?\d+) is out of bounds")
_MOST_NUMBERS = 10**8  # of a column that is looked through: a fraction of a second
_MOST_COLUMNS = 64  # of a tensor whose columns may be labels of tasks with classes of their own


def extreme_examples(dataset: Any) -> list[int]:
    """Return the examples that hold the least and the greatest integer of every column of tensors, each once.

    If the losses can read these, no label is out of range. Data sets that are not made of tensors have none: their
    examples would have to be read one by one.
    """
    return sorted({int(index) for index in _extremes(dataset)})


def _extremes(dataset: Any) -> Iterator[int]:
    kind = type(dataset)
    if kind is TensorDataset:
        for tensor in dataset.tensors:
            yield from _of_tensor(tensor)
    elif kind is Subset and type(dataset.dataset) is TensorDataset:
        rows = torch.as_tensor(dataset.indices, dtype=torch.long)
        for tensor in dataset.dataset.tensors:
            yield from _of_tensor(tensor[rows.to(tensor.device)] if _has_labels(tensor) else tensor)
    elif kind is ConcatDataset:
        for start, member in zip([0, *dataset.cumulative_sizes], dataset.datasets, strict=False):
            yield from (start + index for index in _extremes(member))
    elif kind is StackDataset:
        members = dataset.datasets.values() if isinstance(dataset.datasets, Mapping) else dataset.datasets
        for member in members:
            yield from _of_tensor(member) if type(member) is Tensor else _extremes(member)


def _has_labels(tensor: Tensor) -> bool:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return is_integer and 0 < tensor.numel() <= _MOST_NUMBERS


def _of_tensor(tensor: Tensor) -> list[int]:
    if not _has_labels(tensor):
        return []
    columns = tensor.reshape(len(tensor), -1)
    lows = highs = columns
    if torch.iinfo(tensor.dtype).min <= MISSING:
        lows = columns.masked_fill(columns == MISSING, torch.iinfo(tensor.dtype).max)
    if columns.shape[1] > _MOST_COLUMNS:
        lows, highs = lows.amin(1, keepdim=True), highs.amax(1, keepdim=True)
    return [*lows.argmin(0).tolist(), *highs.argmax(0).tolist()]


def refused_label(error: BaseException) -> int | None:
    """Return the label that a loss of torch has no class for; None for any other error."""
    match = _OUT_OF_RANGE.search(str(error))
    return int(match[1]) if match else None


def label_advice(name: str, error: BaseException, example: str = "a label in the first batch") -> str | None:
    """Say in the user's words what torch's losses say of the labels of a stream; None of any other error."""
    if (label := refused_label(error)) is not None:
        return f"{example} of stream {name!r} is {label}, for which the model has no class: {CLASSES}."
    if match := _WRONG_TYPE.search(str(error)):
        return (
            f"labels of stream {name!r} have type {match[1].lower()}, but the loss wants classes as "
            "integers: convert them with .long()."
        )
    return None


def text_advice(origin: str, error: BaseException, form: str) -> str | None:
    """Say that data hold text where tensors are wanted; None of any other error.

    Args:
        origin: The data, e.g. "stream 'all'".
        error: What was raised.
        form: The types and shapes of what it was raised on.
    """
    if not _NO_TENSOR.search(str(error)) or not re.search(r"\bstr\b", form):
        return None
    return (
        f"{origin} gives text where numbers are wanted ({form}): turn it into numbers in the data set or in "
        "collate_fn, labels for example into positions in a list of classes."
    )


def example_with(label: int, batch: Any, examples: Sequence[int]) -> int | None:
    """Return which example of a batch holds a label; None if none does, or several columns say different ones."""
    rows = {row for tensor in _integers(batch, len(examples)) for row in _rows_with(label, tensor)}
    return examples[rows.pop()] if len(rows) == 1 else None


def _rows_with(label: int, tensor: Tensor) -> list[int]:
    rows: list[int] = (tensor.reshape(len(tensor), -1).long() == label).any(1).nonzero().flatten().tolist()
    return rows


def _integers(batch: Any, size: int) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dim() and len(batch) == size and _has_labels(batch):
            yield batch
    elif isinstance(batch, Mapping | list | tuple):
        members: Iterable[Any] = batch.values() if isinstance(batch, Mapping) else batch
        for member in members:
            yield from _integers(member, size)
