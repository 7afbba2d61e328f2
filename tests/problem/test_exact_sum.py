"""Sums that do not depend on where they are cut."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkmerge.problem.exact_sum import add_exactly, rounded, sum_of_parts

numbers = st.floats(-1e150, 1e150)


@given(st.lists(st.lists(numbers, max_size=4), max_size=4))
def test_a_sum_is_exact_however_its_values_were_grouped(groups: list[list[float]]) -> None:
    parts: list[float] = []
    for group in groups:
        parts = add_exactly(parts, group)
    values = [value for group in groups for value in group]
    exact = sum(map(Fraction, values), Fraction(0))
    assert sum(map(Fraction, parts), Fraction(0)) == exact
    assert rounded(parts) == math.fsum(values)


@pytest.mark.parametrize(("bad", "expected"), [(math.inf, math.inf), (-math.inf, -math.inf), (math.nan, math.nan)])
def test_once_a_value_is_not_finite_the_sum_is_not_either(bad: float, expected: float) -> None:
    parts = add_exactly(add_exactly(add_exactly([], [1.0]), [bad]), [2.0])
    assert rounded(parts) == pytest.approx(expected, nan_ok=True)
    assert len(parts) == 1


def test_a_sum_that_is_too_large_is_infinite_and_stays_so() -> None:
    parts = add_exactly([], [1.7e308, 1.7e308])
    assert rounded(parts) == math.inf
    assert rounded(add_exactly(parts, [-1.7e308])) == math.inf


def test_nothing_sums_to_zero() -> None:
    assert add_exactly([], []) == [0.0]
    assert add_exactly([1.0], [-1.0]) == [0.0]
    assert rounded([]) == 0.0


@given(st.lists(st.floats(0, 1e308), max_size=6))
def test_any_part_of_some_numbers_is_summed_like_rounded(values: list[float]) -> None:
    add = sum_of_parts(values)
    for end in range(len(values) + 1):
        assert add(values[:end]) == rounded(values[:end])


@given(st.lists(st.lists(st.floats(0, allow_nan=False)), max_size=4))
def test_a_running_sum_is_the_sum_of_everything_rounded_once(parts: list[list[float]]) -> None:
    total: list[float] = []
    for part in parts:
        total = add_exactly(total, part)
    assert rounded(total) == rounded([value for part in parts for value in part])
