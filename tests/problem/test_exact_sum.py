"""Sums that are rounded once, whatever the order and the parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forkmerge.problem.exact_sum import add_exactly, rounded


@given(st.lists(st.lists(st.floats(0, allow_nan=False)), max_size=4))
def test_a_running_sum_is_the_sum_of_everything_rounded_once(parts: list[list[float]]) -> None:
    total: list[float] = []
    for part in parts:
        total = add_exactly(total, part)
    assert rounded(total) == rounded([value for part in parts for value in part])
