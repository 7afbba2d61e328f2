"""Pending calls: lost ones are made again with all that depends on them, a stated number of times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forkmerge.engine.executors.executor import Answer, Handle, Inputs, Tell, WorkerError, WorkerLost
from forkmerge.engine.executors.pending_calls import CallLost, PendingCalls
from forkmerge.engine.executors.serial import SerialExecutor
from forkmerge.engine.training.state import State


def add(payload: Any, inputs: Inputs, tell: Tell) -> Answer:
    """Add a number to a copy of the first state, or fail."""
    if payload is None:
        raise WorkerError("Traceback: there is no number")
    (row,) = inputs.read()[0].rows.values()
    return Answer(payload, State(0, {"float32": row + payload}))


class Cluster(SerialExecutor):
    """Ends calls in reverse order, and loses what it is told to: calls, and states of calls that have ended."""

    def __init__(self, lost: Sequence[str] = (), forgotten: Sequence[str] = ()) -> None:
        self.lost, self.forgotten, self.made = list(lost), list(forgotten), list[str]()
        self.inputs: dict[Handle, Sequence[Handle]] = {}
        self.start(lambda index: add)

    def submit(self, payload: Any, handles: Sequence[Handle] = (), *, name: str = "call", note: Any = None) -> Handle:
        self.made.append(name)
        handle = super().submit(payload, handles, name=name, note=note)
        self.inputs[handle] = handles
        return handle

    def first_done(self, handles: Sequence[Handle]) -> Handle:
        return next(h for h in reversed(handles) if not set(self.inputs[h]) & set(handles))

    def result(self, handle: Handle) -> Any:
        if handle.name in self.lost:
            self.lost.remove(handle.name)
            raise WorkerLost(handle, "a power cut")
        for each in self.inputs[handle]:
            if each.name in self.forgotten:
                self.forgotten.remove(each.name)
                raise WorkerLost(each, "a power cut")
        return super().result(handle)


def chain(executor: Cluster) -> tuple[list[str], dict[str, Any], float]:
    """Three calls, each of which starts where the last ended, beside a fourth: their order, results, and the sum."""
    state, calls = State(0, {"float32": torch.zeros(1)}), PendingCalls(executor)
    one = calls.submit(1, [executor.put(state)], name="one")
    two = calls.submit(2, [one], name="two")
    three = calls.submit(3, [two], name="three")
    calls.submit(4, [executor.put(state)], name="apart")
    results = {call.name: call.result() for call in calls}
    executor.fetch(three.handle, state)
    return list(results), results, state.rows["float32"].item()


def test_calls_come_as_they_end() -> None:
    executor = Cluster()
    assert chain(executor) == (["apart", "one", "two", "three"], {"one": 1, "two": 2, "three": 3, "apart": 4}, 6.0)
    assert executor.made == ["one", "two", "three", "apart"]


def test_a_lost_call_is_made_again_with_what_waits_for_it_and_nothing_else() -> None:
    executor = Cluster(lost=["one", "apart", "one"])
    assert chain(executor)[1:] == ({"one": 1, "two": 2, "three": 3, "apart": 4}, 6.0)
    assert executor.made[4:] == ["apart", *["one", "two", "three"] * 2]


def test_a_state_that_went_with_its_worker_is_computed_again_but_its_result_comes_once() -> None:
    executor = Cluster(forgotten=["one"])
    assert chain(executor) == (["apart", "one", "two", "three"], {"one": 1, "two": 2, "three": 3, "apart": 4}, 6.0)
    assert executor.made[4:] == ["one", "two", "three"]
    executor = Cluster(forgotten=["two", "one"])
    assert chain(executor)[1:] == ({"one": 1, "two": 2, "three": 3, "apart": 4}, 6.0)


def test_a_call_that_ends_every_worker_is_given_up_and_the_others_go_on() -> None:
    executor = Cluster(lost=["one"] * 3)
    calls, state = PendingCalls(executor), State(0, {"float32": torch.zeros(1)})
    for name in ("one", "other"):
        calls.submit(1, [executor.put(state)], name=name)
    ended = {call.name: call for call in calls}
    assert ended["other"].result() == 1
    with pytest.raises(CallLost, match="one ended 3 workers, the last with a power cut"):
        ended["one"].result()
    assert executor.made.count("one") == executor.attempts == 3


def test_a_call_that_raised_in_its_worker_is_not_made_again() -> None:
    executor = Cluster()
    calls = PendingCalls(executor)
    calls.submit(None, name="wrong")
    (call,) = calls
    with pytest.raises(WorkerError, match="there is no number"):
        call.result()
    assert executor.made == ["wrong"]


def test_calls_that_are_submitted_meanwhile_come_too() -> None:
    executor = Cluster()
    calls, state = PendingCalls(executor), State(0, {"float32": torch.zeros(1)})
    calls.submit(1, [executor.put(state)], name="first")
    names = []
    for call in calls:
        names.append(call.name)
        if call.name == "first":
            calls.submit(2, [call], name="second")
    assert names == ["first", "second"]
