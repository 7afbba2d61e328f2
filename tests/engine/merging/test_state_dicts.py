"""Merges of plain state dicts: those that do not fit are named."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch

import forkmerge as fm
from _asserts import bits
from forkmerge.engine.merging import state_dicts
from problems import conv_net, plain_net, seeded


def test_key_mismatches_are_named() -> None:
    one, other = bits(seeded(plain_net)), bits(seeded(plain_net))
    del other["heads.odd.bias"]
    with pytest.raises(fm.ProblemError, match=r"'a' and 'b' .*'heads\.odd\.bias' is \(3,\) in one and missing"):
        fm.merge_states({"a": one, "b": other}, {"a": 0.5, "b": 0.5})


def test_branches_with_different_parameters() -> None:
    one, other = seeded(plain_net).state_dict(), seeded(conv_net).state_dict()
    with pytest.raises(fm.ProblemError, match=r"branches 'a' and 'b' have different parameters: 'body\.0\.weight'"):
        fm.merge_states({"a": one, "b": other}, {"a": 0.5, "b": 0.5})
    with pytest.raises(fm.ProblemError, match=r"are for \['a', 'c'\], but the states are \['a', 'b'\]"):
        fm.merge_states({"a": one, "b": one}, {"a": 0.5, "c": 0.5})


def test_states_are_merged_by_name_whatever_the_order_of_the_coefficients() -> None:
    one = {"w": torch.tensor([0.0, 4.0]), "count": torch.tensor(1)}
    other = {"w": torch.tensor([1.0, 4.0]), "count": torch.tensor(2)}
    for coefficients in ({"a": 0.25, "b": 0.75}, {"b": 0.75, "a": 0.25}):
        merged = fm.merge_states({"a": one, "b": other}, coefficients)
        assert list(merged) == ["w", "count"]
        assert merged["w"].tolist() == [0.75, 4.0]
        assert merged["count"] == 2  # counters come from the heaviest
    assert one["w"].tolist() == [0.0, 4.0]


def test_what_only_the_later_state_has_is_named() -> None:
    one, other = {"w": torch.zeros(1)}, {"w": torch.zeros(1), "v": torch.zeros(2)}
    with pytest.raises(fm.ProblemError, match=r"'a' and 'b' have .*: 'v' is missing in one and \(2,\) in the other\.$"):
        fm.merge_states({"a": one, "b": other}, {"a": 0.5, "b": 0.5})
    with pytest.raises(fm.ProblemError, match=r"branches 'b' and 'c' have different parameters"):
        fm.merge_states({"a": one, "b": one, "c": other}, dict.fromkeys("abc", 1 / 3))


def test_the_example_in_the_docstring_holds() -> None:
    result = doctest.testmod(state_dicts)
    assert (result.attempted > 0, result.failed) == (True, 0)


@pytest.mark.parametrize(
    ("states", "coefficients", "message"),
    [
        ({"a": torch.nn.Linear(2, 1)}, {"a": 1.0}, r"state of branch 'a' must be a model's state_dict\(\).*got Linear"),
        ({"a": {"state": {}, "param_groups": []}}, {"a": 1.0}, "state of branch 'a' must be a model's"),
        ([{}], [1.0], "merge_states takes .* got list and list"),
        ({}, {}, "merge_states takes .* got none and none"),
    ],
)
def test_what_are_no_state_dicts_is_refused(states: Any, coefficients: Any, message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        fm.merge_states(states, coefficients)
