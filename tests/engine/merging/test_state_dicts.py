"""Merges of plain state dicts: those that do not fit are named."""

from __future__ import annotations

import pytest

import forkmerge as fm
from _asserts import bits
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
