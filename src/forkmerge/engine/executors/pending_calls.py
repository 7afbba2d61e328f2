"""Calls that an executor has still to end: they come out as they end, and lost ones are made again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from forkmerge.engine.executors.executor import Executor, Handle, Tell, WorkerError, WorkerLost
from forkmerge.engine.training.state import State


class CallLost(RuntimeError):
    """A call has ended worker after worker.

    Args:
        name: The call.
        attempts: How many.
        reason: How the last of them ended.
    """

    def __init__(self, name: str, attempts: int, reason: str) -> None:
        super().__init__(f"{name} ended {attempts} workers, the last with {reason}")
        self.name, self.attempts, self.reason = name, attempts, reason


@dataclass(eq=False)
class PendingCall:
    """A call, however often it has to be made.

    Args:
        payload: What it is about.
        inputs: Its states: handles of those that were put, and calls that end with one.
        name: What it is, for people.
        note: Called with what it tells.
        handle: The last attempt, whose state can be fetched.
        attempts: How many there were.
        data: What it gave, until somebody asks for the result, or
        error: why it gave nothing.
    """

    payload: Any
    inputs: Sequence[Handle | PendingCall]
    name: str
    note: Tell
    handle: Handle = field(init=False)
    attempts: int = 1
    data: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        """Return the data of a call that has ended.

        Raises:
            CallLost: It was given up.
            WorkerError: It raised in its worker.
        """
        data, error, self.data, self.error = self.data, self.error, None, None
        if error is not None:
            raise error
        return data


class PendingCalls:
    """Calls of one executor; iterating waits for them, and gives each as it ends.

    Args:
        executor: Who does them.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._pending: list[PendingCall] = []

    def submit(
        self,
        payload: Any,
        inputs: Sequence[Handle | PendingCall] = (),
        *,
        name: str = "call",
        note: Tell = lambda value: None,
    ) -> PendingCall:
        """Add a call; its inputs may be calls that have not ended."""
        call = PendingCall(payload, inputs, name, note)
        self._make(call)
        self._pending.append(call)
        return call

    def __iter__(self) -> Iterator[PendingCall]:
        """Yield the calls as they end, also those that are submitted meanwhile."""
        while self._pending:
            yield self._next()

    def fetch(self, call: PendingCall, into: State) -> None:
        """Make a state the one with which a call has ended; if that was lost since, the call is made again.

        Raises:
            CallLost: It was given up.
        """
        while True:
            try:
                self.executor.fetch(call.handle, into)
                return
            except WorkerLost as lost:
                self._make_or_give_up(call, lost)
            self._wait_for(call)

    def _wait_for(self, call: PendingCall) -> None:
        """Wait for one call, which has given its data before."""
        while True:
            try:
                self.executor.result(call.handle)
                return
            except WorkerLost as lost:
                self._make_or_give_up(call, lost)

    def _make_or_give_up(self, call: PendingCall, lost: WorkerLost) -> None:
        if not self._make_again(call, lost.handle):
            raise CallLost(call.name, self.executor.attempts, lost.reason) from None

    def _next(self) -> PendingCall:
        while True:
            handle = self.executor.first_done([call.handle for call in self._pending])
            call = next(call for call in self._pending if call.handle is handle)
            try:
                call.data = self.executor.result(handle)
            except WorkerLost as lost:
                if self._make_again(call, lost.handle):
                    continue
                call.error = CallLost(call.name, self.executor.attempts, lost.reason)
            except WorkerError as error:
                call.error = error
            self._pending.remove(call)
            return call

    def _make(self, call: PendingCall) -> None:
        handles = [each.handle if isinstance(each, PendingCall) else each for each in call.inputs]
        call.handle = self.executor.submit(call.payload, handles, name=call.name, note=call.note)

    def _make_again(self, call: PendingCall, lost: Handle) -> bool:
        """Submit a lost call, and those that wait for its state, once more; False if it has had its attempts."""
        first = next(each for each in _with_inputs(call) if each.handle is lost)
        if first.attempts == self.executor.attempts:
            return False
        first.attempts += 1
        is_new: dict[PendingCall, bool] = {}

        def renew(each: PendingCall) -> bool:
            if each not in is_new:
                new_inputs = [renew(other) for other in each.inputs if isinstance(other, PendingCall)]
                is_new[each] = each is first or any(new_inputs)
                if is_new[each]:
                    self._make(each)
            return is_new[each]

        for pending in (*self._pending, call):
            renew(pending)
        return True


def _with_inputs(call: PendingCall) -> Iterator[PendingCall]:
    yield call
    for each in call.inputs:
        if isinstance(each, PendingCall):
            yield from _with_inputs(each)
