"""Data sets that are read in whole batches, example by example, and by threads that are noted."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from forkmerge.problem.definition import Stream
from problems import examples, shared_losses

CPU = torch.device("cpu")
COLUMNS = examples(12, 1)
TENSORS = TensorDataset(*COLUMNS)


class Columnar(Dataset[Any]):
    """A user's own data set with whole batches; notes which threads read them."""

    def __init__(self, count: int = 16, seed: int = 1, fails_at: int = 1 << 30) -> None:
        self.columns = examples(count, seed)
        self.fails_at, self.threads = fails_at, list[str]()

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read example by example")

    def read_batch(self, indices: Tensor) -> list[Tensor]:
        if len(self.threads) >= self.fails_at:
            raise OSError("the disk is gone")
        self.threads.append(threading.current_thread().name)
        return [column[indices] for column in self.columns]


class Opaque(Dataset[Any]):
    """Hides what a data set is made of."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def stream(dataset: Any, **options: Any) -> Stream:
    return Stream(dataset, shared_losses, ["tgt"], 5, **options)


def flat(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for part in (batch.values() if isinstance(batch, dict) else batch) for tensor in flat(part)]


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("forkmerge-feed")]
