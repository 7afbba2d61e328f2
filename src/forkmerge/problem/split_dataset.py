"""Data sets checked, counted, joined and divided; tensors stay tensors, still read by one indexed read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from forkmerge.errors import ProblemError, add_fact


def size_of(dataset: Dataset[Any]) -> int:
    """Return the number of examples."""
    try:
        return len(dataset)  # type: ignore[arg-type]  # Dataset does not promise __len__; map-style ones have it
    except TypeError:
        raise ProblemError(f"a data set of type {type(dataset).__name__} has no length: add __len__.") from None
    except Exception as error:
        add_fact(error, f"in __len__ of a data set of type {type(dataset).__name__}")
        raise


def check_dataset(user: str, dataset: object) -> None:
    """Refuse what is often given in the place of a data set."""
    if isinstance(dataset, DataLoader):
        raise ProblemError(
            f"{user} needs a data set and got a DataLoader, whose order cannot be a function of the step: pass "
            "loader.dataset, and its batch_size and collate_fn as options."
        )
    if isinstance(dataset, tuple | list) and dataset and all(isinstance(member, Tensor) for member in dataset):
        raise ProblemError(f"{user} needs a data set and got {len(dataset)} tensors: wrap them in a TensorDataset.")
    if isinstance(dataset, str | bytes | Path):
        raise ProblemError(f"{user} needs a data set and got {dataset!r}: read it first.")
    if isinstance(dataset, IterableDataset):
        raise ProblemError(
            f"{user} has an iterable data set, whose order cannot be a function of the step. Pass a map-style data set "
            "(__len__ and __getitem__), e.g. a memory map of the rows."
        )
    if not hasattr(dataset, "__getitem__"):
        kind = type(dataset).__name__
        raise ProblemError(f"{user} needs a map-style data set (__len__ and __getitem__), got {kind}.")


def part(dataset: Dataset[Any], count: int | None = None) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return a data set without `count` examples, and these; the same ones every time, a third where None."""
    order = torch.randperm(size_of(dataset), generator=torch.Generator().manual_seed(0))
    count = len(order) // 3 if count is None else count
    parts = order[count:].sort().values, order[:count].sort().values
    first, second = (rows_of(dataset, rows.tolist()) for rows in parts)
    return first, second


def rows_of(dataset: Dataset[Any], rows: list[int]) -> Dataset[Any]:
    """Return some examples of a data set, in the order of their indices."""
    if type(dataset) is TensorDataset:
        return TensorDataset(*(column[torch.tensor(rows)] for column in dataset.tensors))
    return Subset(dataset, rows)


def join(first: Dataset[Any], second: Dataset[Any]) -> Dataset[Any]:
    """Return all examples of two data sets, one after the other."""
    if type(first) is TensorDataset and type(second) is TensorDataset and len(first.tensors) == len(second.tensors):
        return TensorDataset(*map(torch.cat, zip(first.tensors, second.tensors, strict=True)))
    return ConcatDataset([first, second])
