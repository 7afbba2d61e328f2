"""Rows that another process has: brought once, when somebody reads them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from forkmerge.engine.training.remote_rows import RemoteRows
from forkmerge.engine.training.state import State


class Fetch:
    """Counts how often rows are asked for."""

    def __init__(self) -> None:
        self.count, self.memory = 0, {"old": torch.zeros(1)}

    def __call__(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert memory is self.memory
        self.count += 1
        return {"exp_avg/float32": torch.tensor([1.0, torch.inf])}


@pytest.mark.parametrize(
    "read",
    [
        dict,
        len,
        list,
        copy.deepcopy,
        lambda rows: rows["exp_avg/float32"],
        lambda rows: pickle.loads(pickle.dumps(rows)),
    ],
)
def test_reading_brings_them_once(read: object) -> None:
    fetch = Fetch()
    rows = RemoteRows(fetch, "there", are_finite=True, memory=fetch.memory)
    assert (fetch.count, rows.is_here, rows.memory, rows.source) == (0, False, fetch.memory, "there")
    assert callable(read)
    first, second = read(rows), read(rows)
    assert str(first) == str(second)
    assert (fetch.count, rows.is_here, list(rows.memory)) == (1, True, ["exp_avg/float32"])


def test_what_is_to_be_done_with_them_waits_for_them() -> None:
    fetch, seen = Fetch(), []
    rows = RemoteRows(fetch, None, are_finite=True, memory=fetch.memory)
    rows.when_here(lambda here: seen.append(list(here)))
    assert seen == []
    rows["more"] = torch.ones(1)
    rows.when_here(lambda here: seen.append(list(here)))
    assert seen == [["exp_avg/float32"], ["exp_avg/float32", "more"]]
    del rows["more"]
    assert list(rows) == ["exp_avg/float32"]


@pytest.mark.parametrize("are_finite", [True, False])
def test_a_state_need_not_read_them_to_know_that_they_are_finite(are_finite: bool) -> None:
    fetch = Fetch()
    state = State(0, {}, optimizer_rows=RemoteRows(fetch, None, are_finite=are_finite, memory=fetch.memory))
    assert state.is_finite(optimizer=True) == are_finite
    assert fetch.count == (not are_finite)
    assert state.to_value()["optimizer_rows"].keys() == {"exp_avg/float32"}
