"""States as bytes: all of them, or all but the rows."""

from __future__ import annotations

import pickle

import torch

from forkmerge.engine.executors.state_bytes import from_wire, rest_to_wire, rows_of, take_rest, to_wire, with_rows
from forkmerge.engine.training.state import State


def filled() -> State:
    return State(
        7,
        {"float32": torch.randn(10**6)},
        {"norm.mean": torch.randn(3)},
        {"exp_avg/float32": torch.randn(10**6)},
        {"exp_avg/float32": [0, 1]},
        {0: {"step": torch.tensor(7.0)}},
        [{"lr": 0.1, "betas": (0.9, 0.99)}],
        {"last_epoch": 7},
        {"scale": 2.0},
        {"weights": torch.ones(2)},
    )


def test_a_state_comes_out_of_bytes_as_it_went_in() -> None:
    state = filled()
    again = from_wire(pickle.loads(pickle.dumps(to_wire(state))))
    assert to_wire(again) == to_wire(state)
    assert again.groups == state.groups
    assert torch.equal(again.rows["float32"], state.rows["float32"])


def test_the_rest_is_small_and_makes_the_state_with_its_rows() -> None:
    state = filled()
    rest = rest_to_wire(state)
    assert len(pickle.dumps(rest)) < 4000
    assert to_wire(with_rows(from_wire(rest), rows_of(state))) == to_wire(state)


def test_the_rest_of_another_state_leaves_the_rows_alone() -> None:
    state, row = State(0, {"float32": torch.zeros(2)}), torch.zeros(2)
    state.rows["float32"] = row
    take_rest(state, filled())
    assert state.step == 7
    assert state.rows == {"float32": row}
    assert state.optimizer_rows == {}
