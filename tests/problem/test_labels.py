"""Labels that no class is for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

import forkmerge as fm
from forkmerge.errors import facts_of
from forkmerge.problem.labels import MISSING, example_with, extreme_examples, refused_label
from problems import examples, fit, shared_problem


def test_the_extreme_examples_hold_the_least_and_the_greatest_label_of_every_column() -> None:
    for seed in range(50):
        draw = torch.Generator().manual_seed(seed)
        labels = torch.randint(-5, 50, (30, 3), generator=draw)
        labels[random.Random(seed).randrange(30)] = MISSING
        chosen = labels[extreme_examples(TensorDataset(torch.randn(30, 2), labels))]
        for column, own in zip(labels.unbind(1), chosen.unbind(1), strict=True):
            values = [value for value in column.tolist() if value != MISSING]
            assert max(values) == max(own.tolist())
            assert min(values) == min(value for value in own.tolist() if value != MISSING)


def test_wide_tensors_are_looked_at_as_a_whole() -> None:
    maps = torch.zeros(10, 20, 20, dtype=torch.long)
    maps[4, 3, 3], maps[7, 0, 19] = 9, -2
    assert extreme_examples(TensorDataset(maps)) == [4, 7]


@pytest.mark.parametrize(
    "tensor", [torch.randn(5, 2), torch.ones(5, dtype=torch.bool), torch.empty(0, dtype=torch.long)]
)
def test_what_is_no_label_has_no_extremes(tensor: torch.Tensor) -> None:
    assert extreme_examples(TensorDataset(tensor)) == []


def test_bytes_have_no_mark_of_missing_labels() -> None:
    assert extreme_examples(TensorDataset(torch.tensor([3, 156, 0, 7], dtype=torch.uint8))) == [1, 2]


def test_positions_are_those_of_the_data_set_itself() -> None:
    labels = torch.tensor([3, 9, 4, 0, 5])
    plain = TensorDataset(labels)
    assert extreme_examples(plain) == [1, 3]
    assert extreme_examples(Subset(plain, [4, 1, 2])) == [1, 2]
    assert extreme_examples(ConcatDataset([plain, plain])) == [1, 3, 6, 8]
    assert extreme_examples(StackDataset(labels, plain)) == [1, 3]
    assert extreme_examples(StackDataset(x=labels.float(), y=labels)) == [1, 3]
    assert extreme_examples([1, 2, 3]) == []


def test_the_example_to_blame_is_the_one_with_the_label() -> None:
    label = refused_label(IndexError("Target 7 is out of bounds."))
    assert label == 7
    assert refused_label(IndexError("index out of range in self")) is None
    batch = {"x": torch.randn(3, 2), "y": [torch.tensor([1, 7, 0])]}
    assert example_with(7, batch, [10, 20, 30]) == 20
    assert example_with(6, batch, [10, 20, 30]) is None
    assert example_with(7, [torch.tensor([7, 7, 0])], [10, 20, 30]) is None  # two may be


class OneByOne(Dataset[Any]):
    """Examples that are no tensors until they are read."""

    def __init__(self) -> None:
        self.inputs, self.labels = examples(64, 1)
        self.labels[:, 0] = 0
        self.labels[41, 0] = 7

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.labels[index]


def test_where_labels_are_read_one_by_one_the_error_at_the_step_names_stream_example_and_label() -> None:
    with pytest.raises(IndexError, match="Target 7 is out of bounds") as caught:
        fit(fm.ForkMerge("mixed", interval=4), shared_problem(OneByOne()))
    text = "\n".join(facts_of(caught.value))
    assert "stream 'all'" in text
    assert "example 41 has the label 7" in text
