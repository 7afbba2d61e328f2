"""Which examples a step sees, and which task it trains: functions of their arguments alone."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forkmerge.problem import example_order

sizes = st.integers(1, 40)


def stretch(size: int, batch: int, count: int, seed: int = 0, stream: str = "s") -> list[int]:
    """The first `count` batches of a stream, one after the other."""
    return [i for p in range(count) for i in example_order.batch_indices(size, batch, p, seed, stream).tolist()]


class TestBatches:
    @given(size=sizes, batch=sizes, seed=st.integers(0, 99))
    def test_batches_run_across_epoch_boundaries_and_every_epoch_is_a_permutation(
        self, size: int, batch: int, seed: int
    ) -> None:
        epochs = 3
        count = -(-size * epochs // batch)
        flat = stretch(size, batch, count, seed)
        assert len(flat) == count * batch
        for epoch in range(epochs):
            assert sorted(flat[epoch * size : (epoch + 1) * size]) == list(range(size))

    def test_a_batch_may_be_larger_than_the_data_set(self) -> None:
        batch = example_order.batch_indices(3, 8, 0, 0, "s").tolist()
        assert len(batch) == 8
        assert sorted(Counter(batch).values()) == [2, 3, 3]

    def test_a_batch_is_a_pure_function_of_its_place(self) -> None:
        late = example_order.batch_indices(10, 4, 7, 1, "s").tolist()
        stretch(10, 4, 5)
        assert example_order.batch_indices(10, 4, 7, 1, "s").tolist() == late

    def test_seed_stream_and_epoch_change_the_order(self) -> None:
        one = stretch(50, 50, 2)
        assert one[:50] != one[50:]
        assert one != stretch(50, 50, 2, seed=1)
        assert one != stretch(50, 50, 2, stream="t")

    def test_the_callers_random_state_is_not_touched(self) -> None:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        stretch(20, 7, 4)
        example_order.sample_indices(20, 5, 0)
        example_order.pick_task(["a", "b"], [1.0, 1.0], 0, 3)
        assert torch.equal(torch.get_rng_state(), before)


class TestHugeDataSets:
    @pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
    def test_the_index_bijection_is_a_permutation(self, size: int) -> None:
        moved = example_order._bijection(np.arange(size, dtype=np.uint64), size, seed=7).tolist()
        assert sorted(moved) == list(range(size))

    def test_it_shuffles_and_depends_on_the_seed(self) -> None:
        index = np.arange(1000, dtype=np.uint64)
        one, other = (example_order._bijection(index, 1000, seed).tolist() for seed in (0, 1))
        assert one != other
        ascending = sum(a < b for a, b in pairwise(one))
        assert 400 < ascending < 600
        assert sum(a == b for a, b in zip(one, range(1000), strict=True)) < 10

    def test_batches_of_a_data_set_that_is_not_stored_shuffled_are_permutations_too(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(example_order, "LARGEST_PERMUTATION", 10)
        flat = stretch(23, 5, 10)
        assert sorted(flat[:23]) == sorted(flat[23:46]) == list(range(23))
        assert flat[:23] != flat[23:46]

    def test_a_huge_data_set_costs_no_memory_of_its_size(self) -> None:
        chosen = example_order.batch_indices(10**12, 64, 10**9, 0, "s")
        assert len(set(chosen.tolist())) == 64
        assert chosen.max() < 10**12


class TestSamples:
    @given(size=sizes, count=sizes)
    def test_a_sample_is_distinct_and_in_order(self, size: int, count: int) -> None:
        chosen = example_order.sample_indices(size, count, 0, "validation", 1)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(size, count)
        assert set(chosen) <= set(range(size))

    def test_another_round_draws_another_sample(self) -> None:
        assert example_order.sample_indices(100, 10, 0, "validation", 1) != example_order.sample_indices(
            100, 10, 0, "validation", 2
        )


class TestTaskSampling:
    def test_tasks_are_picked_in_proportion_to_their_weights(self) -> None:
        picked = Counter(example_order.pick_task(["a", "b", "c"], [1.0, 2.0, 5.0], 0, step) for step in range(4000))
        for task, share in {"a": 1 / 8, "b": 2 / 8, "c": 5 / 8}.items():
            assert picked[task] / 4000 == pytest.approx(share, abs=0.03)

    @pytest.mark.parametrize("weights", [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    def test_a_task_of_weight_zero_is_never_picked(self, weights: list[float], monkeypatch: Any) -> None:
        never = "abc"[weights.index(0.0)]
        assert never not in {example_order.pick_task("abc", weights, 0, step) for step in range(300)}
        for edge in (0.0, 0.5, 1 - 2**-53):  # the ends of the intervals, where a comparison could slip
            monkeypatch.setattr(example_order, "uniform", lambda *parts, edge=edge: edge)
            assert example_order.pick_task("abc", weights, 0, 0) != never

    def test_the_task_of_a_step_is_a_function_of_seed_step_and_weights(self) -> None:
        one = [example_order.pick_task("ab", [1, 1], 0, step) for step in range(50)]
        assert one == [example_order.pick_task("ab", [1, 1], 0, step) for step in range(50)]
        assert one != [example_order.pick_task("ab", [1, 1], 1, step) for step in range(50)]
