"""Calls in this process, one after the other: the reference for all other executors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from forkmerge.engine.executors.executor import Answer, Call, Executor, Handle, Inputs, Tell, WorkerError
from forkmerge.engine.training.state import State


@dataclass(eq=False, repr=False)
class _SerialHandle(Handle):
    """A state, or a call that is done when it is asked for."""

    name: str
    payload: Any = None
    inputs: Sequence[Handle] = ()
    note: Tell = lambda value: None
    state: State | None = None
    has_begun: bool = False
    data: Any = None
    has_ended: bool = False


@dataclass(frozen=True)
class _OwnStates(Inputs):
    """States of this process: taken as they are."""

    states: list[State]

    def read(self) -> list[State]:
        return self.states

    def take(self) -> State:
        return self.states[0]

    def scratch(self) -> State:
        return State(0, {name: torch.empty_like(row) for name, row in self.states[0].rows.items()})


class SerialExecutor(Executor):
    """Does every call here when its result is asked for; states are changed in place, and nothing is ever copied."""

    workers = 1
    runs_here: ClassVar[bool] = True

    def start(self, make: Callable[[int], Call]) -> None:
        """Make the function that does the calls."""
        self._call = make(0)

    def put(self, state: State) -> Handle:
        """Return a handle of the state itself."""
        return _SerialHandle("state", state=state, has_begun=True, has_ended=True)

    def submit(
        self, payload: Any, handles: Sequence[Handle] = (), *, name: str = "call", note: Tell = lambda value: None
    ) -> Handle:
        """Return a handle of a call that has not begun."""
        return _SerialHandle(name, payload, handles, note)

    def result(self, handle: Handle) -> Any:
        """Do the call, and return its data."""
        call = self._done(handle)
        data, call.data = call.data, None
        return data

    def fetch(self, handle: Handle, into: State) -> None:
        """Give the state's tensors to another; usually it is the same one."""
        state = self._done(handle).state
        assert state is not None, f"{handle.name} ended without a state"
        if state is not into:
            for item in fields(State):
                setattr(into, item.name, getattr(state, item.name))

    def close(self) -> None:
        """There is nothing to end."""

    def _done(self, handle: Handle) -> _SerialHandle:
        """Return a handle whose call has been done, its inputs before it."""
        assert isinstance(handle, _SerialHandle)
        if not handle.has_begun:
            states = [self._done(each).state for each in handle.inputs]
            handle.has_begun = True
            handle.note(None)
            answer: Answer = self._call(handle.payload, _OwnStates([s for s in states if s is not None]), handle.note)
            handle.data, handle.state, handle.inputs, handle.has_ended = answer.data, answer.state, (), True
        if not handle.has_ended:
            raise WorkerError(f"{handle.name} has failed")  # what it raised is not kept: it would keep states, too
        return handle


def local_executor(workers: int) -> Executor:
    """Return an executor on this machine, whose processes, if there are several, begin to start."""
    if workers < 2:
        return SerialExecutor()
    from forkmerge.engine.executors.process_executor import ProcessExecutor  # which most programs never need

    return ProcessExecutor(workers)
