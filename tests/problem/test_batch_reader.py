"""Whole batches by one indexed read: what collating their examples gives, and only where no code is passed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate

import forkmerge as fm
from _asserts import assert_same_run
from batch_data import COLUMNS, CPU, TENSORS, Columnar, Opaque, flat, stream
from forkmerge.problem.batch_reader import reader_of
from forkmerge.problem.definition import Evaluation
from problems import evaluation, examples, fit, noisy_net, shared_problem

READABLE: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TENSORS,
    "a subset": lambda: Subset(TENSORS, [3, 1, 4, 1, 5, 9]),
    "a subset of a subset": lambda: Subset(Subset(TENSORS, [3, 1, 4, 1, 5, 9]), range(1, 5)),
    "a subset by tensor": lambda: Subset(TENSORS, torch.tensor([7, 2, 0])),  # type: ignore[arg-type]
    "a subset by array": lambda: Subset(TENSORS, np.array([7, 2, 0])),  # type: ignore[arg-type]
    "a subset from the end": lambda: Subset(TENSORS, [-1, -12, 3]),
    "a random split": lambda: torch.utils.data.random_split(TENSORS, [4, 8], torch.Generator().manual_seed(0))[1],
    "a concatenation": lambda: ConcatDataset([TENSORS, Subset(TENSORS, [2, 2]), TensorDataset(*examples(7, 5))]),
    "a stack": lambda: StackDataset(COLUMNS[0], Subset(TENSORS, range(12))),
    "named columns": lambda: StackDataset(x=COLUMNS[0], y=COLUMNS[1]),
    "named columns, joined": lambda: ConcatDataset([StackDataset(x=COLUMNS[0], y=COLUMNS[1])] * 2),
}


class TestWholeBatches:
    @pytest.mark.parametrize("name", READABLE)
    def test_a_whole_batch_is_what_collating_its_examples_gives(self, name: str) -> None:
        dataset = READABLE[name]()
        reader = reader_of(stream(dataset))
        assert reader is not None
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            indices = torch.randint(len(dataset), (9,), generator=generator)
            whole, collated = reader.read(indices), default_collate([dataset[i] for i in indices.tolist()])
            assert type(whole) is type(collated)
            for one, other in zip(flat(whole), flat(collated), strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)

    @pytest.mark.parametrize("name", READABLE)
    def test_no_thread_reads_tensors_that_are_where_the_model_is(self, name: str) -> None:
        reader = reader_of(stream(READABLE[name]()))
        assert reader is not None
        assert not reader.is_worth_a_thread(CPU)
        assert reader.is_worth_a_thread(torch.device("cuda:0"))

    def test_code_of_the_users_is_never_passed_over(self) -> None:
        class Twice(TensorDataset):
            def __getitem__(self, index: Any) -> Any:
                return tuple(2 * column for column in super().__getitem__(index))

        class Other(Columnar):
            def __getitem__(self, index: int) -> Any:
                return self.columns[0][index]

        class Both(Other):
            def read_batch(self, indices: Tensor) -> Any:
                return self.columns[0][indices]

        assert reader_of(stream(Columnar())) is not None
        assert reader_of(stream(Both())) is not None
        for dataset in (Twice(*COLUMNS), Other(), Opaque(TENSORS), Subset(Other(), [1]), StackDataset(Twice(*COLUMNS))):
            assert reader_of(stream(dataset)) is None
        assert reader_of(stream(ConcatDataset([TENSORS, Opaque(TENSORS)]))) is None
        assert reader_of(stream(TENSORS, collate_fn=default_collate)) is None

    def test_a_subset_that_has_grown_is_read_as_it_is_now(self) -> None:
        chosen = [0, 1]
        reader = reader_of(stream(Subset(TENSORS, chosen)))
        assert reader is not None
        chosen[0] = 7
        assert torch.equal(reader.read(torch.tensor([0]))[0], COLUMNS[0][7:8])

    def test_joined_data_sets_of_different_form_get_one_clear_error(self) -> None:
        reader = reader_of(stream(ConcatDataset([TENSORS, TensorDataset(COLUMNS[0])])))
        assert reader is not None
        assert len(reader.read(torch.tensor([12, 13]))) == 1
        with pytest.raises(fm.ProblemError, match="different form: 1 columns, 2 columns"):
            reader.read(torch.tensor([0, 12]))

    @pytest.mark.parametrize("name", ["a subset", "a concatenation"])
    def test_a_run_has_the_bits_of_reading_example_by_example(self, name: str) -> None:
        dataset = READABLE[name]()
        held_out = Subset(TensorDataset(*examples(30, 2)), range(2, 26))
        runs = []
        for hide in (Opaque, lambda x: x):
            scored = Evaluation(hide(held_out), evaluation().metrics, evaluation().predict, batch_size=10)
            algorithm = fm.ForkMerge("mixed", interval=4, refit=True)
            runs.append(fit(algorithm, shared_problem(hide(dataset), validation=scored), noisy_net))
        assert_same_run(*runs)
