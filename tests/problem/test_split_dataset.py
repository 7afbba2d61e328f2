"""Data sets joined and divided: the same parts every time, which overlap nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import forkmerge as fm
from forkmerge.errors import facts_of
from forkmerge.problem.split_dataset import join, part, size_of


def rows(dataset: object) -> list[float]:
    return [float(dataset[index][0].sum()) for index in range(len(dataset))]  # type: ignore[arg-type,index]


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(9))])
def test_the_parts_are_the_same_every_time_and_overlap_nowhere(wrap: object) -> None:
    data = wrap(TensorDataset(torch.arange(9.0)[:, None]))  # type: ignore[operator]
    kept, held = part(data)
    assert rows(kept) == rows(part(data)[0])
    assert sorted(rows(kept) + rows(held)) == list(range(9))
    assert type(kept) is type(data)


def test_joined_examples_come_one_after_the_other_and_tensors_stay_tensors() -> None:
    first, second = (TensorDataset(torch.arange(float(count))[:, None]) for count in (3, 2))
    joined = join(first, second)
    assert isinstance(joined, TensorDataset)
    assert rows(joined) == [0.0, 1.0, 2.0, 0.0, 1.0]
    mixed = join(first, Subset(second, [1]))
    assert rows(mixed) == [0.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("kind", ["stream", "evaluation"])
def test_what_is_no_data_set_is_refused_by_name(kind: str) -> None:
    def make(dataset: Any) -> Any:
        if kind == "stream":
            return fm.Stream(dataset, lambda model, batch, tasks, context: {}, ("tgt",), 4)
        return fm.Evaluation(dataset, fm.accuracy)

    with pytest.raises(fm.ProblemError, match=r"needs a data set and got a DataLoader.*: pass loader\.dataset"):
        make(DataLoader(TensorDataset(torch.zeros(4))))
    with pytest.raises(fm.ProblemError, match=r"needs a data set and got 'train\.csv': read it first"):
        make("train.csv")


def test_a_length_that_fails_says_whose_it_is() -> None:
    class Unreadable(TensorDataset):
        def __len__(self) -> int:
            raise OSError("no index")

    with pytest.raises(OSError, match="no index") as caught:
        size_of(Unreadable(torch.zeros(3)))
    assert any("__len__ of a data set of type Unreadable" in fact for fact in facts_of(caught.value))
