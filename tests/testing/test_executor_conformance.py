"""The conformance check of executors: every kind of broken one is caught by what it does wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from forkmerge.engine.executors.executor import Call, Executor, Handle
from forkmerge.engine.executors.process_executor import ProcessExecutor
from forkmerge.engine.executors.serial import SerialExecutor
from forkmerge.engine.training.state import State
from forkmerge.testing import check_executor


class Confused(SerialExecutor):
    """Gives the data of the first call for every other one."""

    def submit(self, payload: Any, handles: Sequence[Handle] = (), **options: Any) -> Handle:
        self.first = getattr(self, "first", None) or super().submit(payload, handles, **options)
        return self.first


class Nameless(SerialExecutor):
    """Forgets the names of calls."""

    def submit(self, payload: Any, handles: Sequence[Handle] = (), *, name: str = "call", **options: Any) -> Handle:
        return super().submit(payload, handles, **options)


class Miscounting(SerialExecutor):
    """Counts its workers from 1."""

    def start(self, make: Callable[[int], Call]) -> None:
        super().start(lambda index: make(index + 1))


class Silent(SerialExecutor):
    """Passes no notes on."""

    def submit(self, payload: Any, handles: Sequence[Handle] = (), *, note: Any = None, **options: Any) -> Handle:
        return super().submit(payload, handles, **options)


class Stubborn(SerialExecutor):
    """Says that the same call is the next to end, again and again."""

    def first_done(self, handles: Sequence[Handle]) -> Handle:
        self.last = getattr(self, "last", handles[0])
        return self.last


class Forgetful(SerialExecutor):
    """Brings the weights, and leaves the optimizer's rows behind."""

    def fetch(self, handle: Handle, into: State) -> None:
        super().fetch(handle, into)
        into.optimizer_rows = {}


class Impatient(SerialExecutor):
    """Starts a call from what its input was before the call that computes it."""

    def submit(self, payload: Any, handles: Sequence[Handle] = (), **options: Any) -> Handle:
        early = [each.inputs[0] if getattr(each, "inputs", ()) else each for each in handles]  # type: ignore[attr-defined]
        copies = [
            self.put(each.state.clone()) if payload[0] == "train" and each.state else each  # type: ignore[attr-defined]
            for each in early
        ]
        return super().submit(payload, copies, **options)


class Stubbed(SerialExecutor):
    """Fetches into the state that was put, whatever it is asked for."""

    def fetch(self, handle: Handle, into: State) -> None:
        self._done(handle)


class Shuffling(SerialExecutor):
    """Mixes up the states that calls read."""

    def submit(self, payload: Any, handles: Sequence[Handle] = (), **options: Any) -> Handle:
        return super().submit(payload, handles[:1] * len(handles) if payload[0] == "add" else handles, **options)


class Scribbling(SerialExecutor):
    """Lets calls that read write to what others read."""

    def start(self, make: Callable[[int], Call]) -> None:
        call = make(0)

        def scribble(payload: Any, inputs: Any, tell: Any) -> Any:
            answer = call(payload, inputs, tell)
            if payload[0] == "add":
                inputs.states[-1].buffers = {"spoiled": torch.zeros(1)}
            return answer

        super().start(lambda index: scribble)


class Swallowing(SerialExecutor):
    """Gives None for a call that raised."""

    def result(self, handle: Handle) -> Any:
        try:
            return super().result(handle)
        except Exception:
            return None


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Confused, "result must give the data of the call that was asked for"),
        (Nameless, "a handle must carry the name of its call"),
        (Miscounting, "workers must be made with indices from 0"),
        (Silent, "notes must be None and then what the call told"),
        (Stubborn, "first_done must return one of the handles"),
        (Forgetful, "must end with the bits of a serial run, in all fields of the state"),
        (Impatient, "must end with the bits of a serial run"),
        (Stubbed, "fetch must make any state the one with which the call ended"),
        (Shuffling, "several calls may read the same states, in the order of the handles"),
        (Scribbling, "states that calls only read must stay as they are"),
        (Swallowing, "result must raise what the call raised"),
    ],
)
def test_a_broken_executor_is_caught(broken: Callable[[], Executor], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_executor(broken)


class Careless(ProcessExecutor):
    """Lets the worker that ends write to the rows that its call starts from."""

    def submit(self, payload: Any, handles: Sequence[Handle] = (), **options: Any) -> Handle:
        if payload[0] == "end":
            self.rows.spare = lambda rows: rows  # type: ignore[method-assign]
        return super().submit(payload, handles, **options)


def test_an_executor_that_spoils_the_start_of_a_lost_call_is_caught() -> None:
    with pytest.raises(AssertionError, match="the inputs of a lost call must be as they were"):
        check_executor(lambda: Careless(1))
