"""Rows in shared memory: put there once, exchanged instead of copied, no more spare ones than workers need."""

from __future__ import annotations

import gc

import torch

from forkmerge.engine.executors.shared_rows import SharedRows, WorkerRows
from forkmerge.engine.executors.state_bytes import rows_of
from forkmerge.engine.training.state import State

ROW, MOMENT = ("rows", "float32"), ("optimizer_rows", "momentum/float32")


def branch(value: float) -> State:
    return State(0, {"float32": torch.full((50,), value)}, optimizer_rows={"momentum/float32": torch.zeros(50)})


def test_a_row_that_lies_in_shared_memory_stays_where_it_is_whoever_holds_it() -> None:
    shared, state = SharedRows(1), branch(1.0)
    rows = shared.share(state)
    assert rows_of(state) == rows
    weights = State(0, state.rows)
    assert shared.share(weights)[ROW] is rows[ROW]
    assert len(shared.alive) == 2
    part = State(0, {"float32": state.rows["float32"][:25]})
    assert shared.share(part)[ROW] is not rows[ROW], "a part of a row is no row"


def test_a_row_shared_through_the_dict_of_a_state_moves_in_the_state() -> None:
    shared, state = SharedRows(1), branch(1.0)
    rows = shared.share(State(0, state.rows))
    assert state.rows["float32"] is rows[ROW]


def test_rows_change_places() -> None:
    shared, state = SharedRows(1), branch(1.0)
    before = shared.share(state)
    spare = shared.spare(before)
    spare[ROW].fill_(5.0)
    shared.install(state, spare)
    assert state.rows["float32"] is spare[ROW]
    assert shared.spare(spare)[ROW].data_ptr() in {row.data_ptr() for row in before.values()}
    assert len(shared.alive) == 4


def test_spare_rows_are_kept_for_so_many_states() -> None:
    shared = SharedRows(2)
    rows = [shared.share(branch(float(index))) for index in range(5)]
    for each in rows:
        shared.give_back(each)
        shared.give_back(each)  # once more changes nothing
    del rows, each
    gc.collect()
    assert len(shared.alive) == 2 * 2
    shared.give_back({ROW: shared.spare({ROW: torch.zeros(50)})[ROW]})
    gc.collect()
    assert len(shared.alive) == 2 * 2, "the rows of a measurement do not push out those of training"


def test_rows_of_another_device_are_no_shared_memory() -> None:
    shared = SharedRows(1)
    state = State(0, {"float32": torch.zeros(50, device="meta")})
    shared.give_back(rows_of(state))
    assert not shared.alive


def test_rows_on_another_device_are_written_to_and_the_shared_ones_become_spare() -> None:
    shared, row = SharedRows(1), torch.zeros(50, device="meta")
    state = State(0, {"float32": row})
    spare = shared.spare({ROW: torch.zeros(50)})
    shared.install(state, {**spare, MOMENT: torch.ones(50)})
    assert state.rows["float32"] is row
    assert state.optimizer_rows["momentum/float32"].tolist() == [1.0] * 50, "a new row is left to be moved"
    assert shared.spare(spare)[ROW].data_ptr() == spare[ROW].data_ptr()


def test_memory_goes_with_the_last_tensor_in_it() -> None:
    shared, state = SharedRows(1), branch(1.0)
    view = shared.share(state)[ROW][3:5]
    del state
    gc.collect()
    assert len(shared.alive) == 1
    del view
    gc.collect()
    assert not shared.alive


def test_a_worker_leaves_rows_where_they_belong_and_others_in_new_memory() -> None:
    shared, worker = SharedRows(1), WorkerRows()
    state = State(0, {"float32": torch.zeros(50)})
    rows = shared.share(state)
    spare = shared.spare(rows)
    memories = shared.unknown(set(), [rows, spare])
    assert len(memories) == 2
    assert shared.unknown({memory.key for memory in memories}, [rows, spare]) == []
    worker.note(memories, ())
    address = shared.address_of(spare)
    there = worker.find(address)
    there[ROW].fill_(2.0)
    result, made = worker.publish({**there, MOMENT: torch.ones(50)}, address)
    assert result[ROW] == address[ROW]
    assert [memory.key for memory in made] == [result[MOMENT][0]]
    shared.adopt(made)
    assert shared.find(result)[ROW].tolist() == [2.0] * 50
    assert shared.find(result)[MOMENT].tolist() == [1.0] * 50
    assert rows[ROW].sum() == 0
    worker.note([], [memory.key for memory in (*memories, *made)])
    assert worker.find({}) == {}
