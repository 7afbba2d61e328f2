"""Data sets joined, and divided; tensors stay tensors, so that they are still read by one indexed read."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset


def part(dataset: Dataset[Any]) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return two thirds of a data set, and the rest; the same examples every time."""
    size = len(dataset)  # type: ignore[arg-type]  # checked by Problem
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    parts = order[len(order) // 3 :].sort().values, order[: len(order) // 3].sort().values
    if type(dataset) is TensorDataset:
        kept, held = (TensorDataset(*(column[rows] for column in dataset.tensors)) for rows in parts)
        return kept, held
    first, second = (Subset(dataset, rows.tolist()) for rows in parts)
    return first, second


def join(first: Dataset[Any], second: Dataset[Any]) -> Dataset[Any]:
    """Return all examples of two data sets, one after the other."""
    tensors = type(first) is TensorDataset and type(second) is TensorDataset
    if tensors and len(first.tensors) == len(second.tensors):  # type: ignore[attr-defined]
        pairs = zip(first.tensors, second.tensors, strict=True)  # type: ignore[attr-defined]
        return TensorDataset(*(torch.cat(pair) for pair in pairs))
    return ConcatDataset([first, second])
