"""From a data set to the batches of a step or an evaluation, by their positions alone."""

from __future__ import annotations

from typing import Any

import torch

import forkmerge as fm
from batch_data import COLUMNS, CPU, TENSORS, Columnar, Opaque, flat, stream
from forkmerge.problem.batches import batches, evaluation_batches
from forkmerge.problem.definition import Evaluation
from problems import Augmented, Counted, shared_losses


def test_evaluation_batches_follow_the_order_given() -> None:
    order = [5, 3, 11, 0]
    for dataset in (Columnar(12, 1), TENSORS, Opaque(TENSORS)):
        scored = Evaluation(dataset, fm.accuracy, batch_size=3)
        parts = list(evaluation_batches(scored, order, 0, CPU))
        assert [len(x) for x, _ in parts] == [3, 1]
        assert torch.equal(torch.cat([x for x, _ in parts]), COLUMNS[0][order])


def test_batches_of_a_stream_are_those_of_its_positions() -> None:
    for dataset in (TENSORS, Opaque(TENSORS), Columnar(12, 1)):
        first = [flat(batch) for batch in batches("s", stream(dataset), range(6), 3, CPU)]
        again = [flat(batch) for batch in batches("s", stream(dataset), [4, 2], 3, CPU)]
        for one, position in zip(again, (4, 2), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, first[position], strict=True))


class TestBatches:
    def stream(self, dataset: Any, **options: Any) -> fm.Stream:
        return fm.Stream(dataset, shared_losses, ("tgt",), batch_size=4, **options)

    def test_only_the_examples_of_the_positions_asked_for_are_read(self) -> None:
        data = Counted()
        list(batches("s", self.stream(data), [3, 9], seed=0, device=CPU))
        assert data.reads == 8

    def test_randomness_of_an_example_is_a_function_of_its_place_not_of_what_was_read_before(self) -> None:
        stream = self.stream(Augmented())
        both = list(batches("s", stream, [4, 5], seed=0, device=CPU))
        alone = list(batches("s", stream, [5], seed=0, device=CPU))
        assert torch.equal(both[1][0], alone[0][0])

    def test_the_same_example_is_augmented_differently_at_another_step(self) -> None:
        stream = self.stream(Augmented(count=1))
        one, other = batches("s", stream, [0, 1], seed=0, device=CPU)
        rows = torch.cat([one[0], other[0]])
        assert len({tuple(row.tolist()) for row in rows}) == 8
