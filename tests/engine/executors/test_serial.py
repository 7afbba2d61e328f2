"""Calls in this process: nothing happens before it is asked for, and nothing is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forkmerge.engine.executors.executor import Answer, Inputs, Tell, WorkerError
from forkmerge.engine.executors.serial import SerialExecutor
from forkmerge.engine.training.state import State


def add(payload: float, inputs: Inputs, tell: Tell) -> Answer:
    state = inputs.take()
    tell(f"adding {payload}")
    if payload < 0:
        raise ValueError("no negative numbers")
    state.rows["float32"] += payload
    return Answer(payload, state)


def started() -> SerialExecutor:
    executor = SerialExecutor()
    executor.start(lambda index: add)
    return executor


def test_a_call_begins_when_its_result_is_asked_for_after_its_inputs() -> None:
    executor, state, notes = started(), State(0, {"float32": torch.zeros(3)}), list[Any]()
    row = state.rows["float32"]
    first = executor.submit(1.0, [executor.put(state)], note=notes.append)
    second = executor.submit(2.0, [first], note=notes.append)
    assert not notes
    assert executor.result(second) == 2.0
    assert notes == [None, "adding 1.0", None, "adding 2.0"]
    assert executor.result(first) == 1.0, "which has not been done twice"
    executor.fetch(second, state)
    assert state.rows["float32"] is row
    assert row.tolist() == [3.0] * 3


def test_a_state_is_fetched_without_a_copy() -> None:
    executor, state, other = started(), State(4, {"float32": torch.zeros(3)}), State(0, {})
    handle = executor.submit(1.0, [executor.put(state)])
    executor.result(handle)
    executor.fetch(handle, other)
    assert (other.step, other.rows["float32"] is state.rows["float32"]) == (4, True)


def test_what_a_call_raises_is_raised_as_it_is_and_the_call_is_not_done_again() -> None:
    executor, notes = started(), list[Any]()
    failed = executor.submit(-1.0, [executor.put(State(0, {}))], note=notes.append)
    after = executor.submit(1.0, [failed])
    with pytest.raises(ValueError, match="no negative numbers"):
        executor.result(failed)
    with pytest.raises(WorkerError, match="call has failed"):
        executor.result(after)
    assert notes == [None, "adding -1.0"]
