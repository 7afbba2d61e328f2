"""What a Ray worker does: calls in a thread of their own, whose states come and go as arrays."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError
from torch import Tensor

from forkmerge.engine.executors.executor import Answer, Call, Inputs
from forkmerge.engine.executors.ray.arrays import Arrays, copy_rows, to_arrays, to_rows
from forkmerge.engine.executors.resources import is_shortage, shortage
from forkmerge.engine.executors.state_bytes import Wire, from_wire, rest_to_wire
from forkmerge.engine.training.interrupts import request_stop
from forkmerge.engine.training.state import State
from forkmerge.errors import ForkMergeError, ResourceError, shows_all_frames, user_traceback

Item = tuple[str, Any]
"""What a stream says: "note", "done", "failed" (a traceback), "lost" (a reason), "absent" (an input), or "end"."""


@dataclass(frozen=True)
class SentState:
    """An input of a call.

    Args:
        rest: The state without its rows.
        rows: Where its parameter rows are, in a list so that Ray does not wait for them itself.
        optimizer_rows: Where those of the optimizer are; none if it has none.
        origin: The call that ended with these optimizer rows; the worker that did it may still hold them.
    """

    rest: Wire
    rows: list[Any]
    optimizer_rows: list[Any]
    origin: int | None = None


@dataclass(frozen=True)
class RayCall:
    """A call as it is sent to a worker.

    Args:
        number: Of the call, one of a kind.
        payload: What it is about, pickled.
        inputs: Its states.
    """

    number: int
    payload: bytes
    inputs: list[SentState]


@dataclass
class _HeldRows:
    """Rows of this process, used again for the next call.

    Args:
        rows: Parameter rows, of any content.
        optimizer_rows: Rows of the optimizer, those with which
        origin: this call ended; any content if None.
    """

    rows: dict[str, Tensor] = field(default_factory=dict)
    optimizer_rows: dict[str, Tensor] = field(default_factory=dict)
    origin: int | None = None


class _AbsentInput(Exception):
    """The node that held a state is gone.

    Args:
        position: The state's among the inputs.
    """

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


@dataclass
class _ArrayStates(Inputs):
    """States that Ray keeps: read where they are, or copied to be changed."""

    sent: list[SentState]
    memory: _HeldRows
    is_taken: bool = False

    def read(self) -> list[State]:
        return [self._state(position) for position in range(len(self.sent))]

    def take(self) -> State:
        first, memory = self.sent[0], self.memory
        state = from_wire(first.rest)
        is_held = first.origin is not None and first.origin == memory.origin
        # What is changed from here on belongs to no call, until this one has ended.
        memory.origin, self.is_taken = None, True
        state.rows = copy_rows(self._get(0, first.rows), memory.rows)
        if is_held:
            state.optimizer_rows = memory.optimizer_rows
        else:
            state.optimizer_rows = copy_rows(self._get(0, first.optimizer_rows), memory.optimizer_rows)
        return state

    def scratch(self) -> State:
        like = to_rows(self._get(0, self.sent[0].rows))
        self.memory.rows = {name: _room(self.memory.rows.get(name), row) for name, row in like.items()}
        return State(0, dict(self.memory.rows))

    def _state(self, position: int) -> State:
        sent = self.sent[position]
        state = from_wire(sent.rest)
        state.rows = to_rows(self._get(position, sent.rows))
        state.optimizer_rows = to_rows(self._get(position, sent.optimizer_rows))
        return state

    def _get(self, position: int, places: list[Any]) -> Arrays:
        try:
            return ray.get(places[0]) if places else {}
        except ObjectLostError:
            raise _AbsentInput(position) from None


def _room(old: Tensor | None, like: Tensor) -> Tensor:
    fits = old is not None and (old.dtype, old.shape) == (like.dtype, like.shape)
    return old if fits and old is not None else torch.empty_like(like)


class CallThread:
    """Does the calls of one worker.

    All of them, and what makes their function, run in one thread: torch's number of threads is a thread's own.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="calls")
        self._memory = _HeldRows()
        self._call: Call

    def prepare(self, index: int, make: Any) -> Item:
        """Make what does the calls, from where it is; return "ready", or "refused" or "failed" and why."""
        try:
            self._thread.submit(self._make, index, make).result()
        except ForkMergeError as error:
            return "refused", str(error)
        except Exception as error:
            return "failed", _described(error)
        return "ready", None

    def stream(self, message: RayCall) -> Iterator[Any]:
        """Yield what a call tells and what comes of it; after "done" and a state its two kinds of rows, then "end"."""
        items: SimpleQueue[Any] = SimpleQueue()
        self._thread.submit(self._do, message, items.put)
        while True:
            item = items.get()
            yield item
            if isinstance(item, tuple) and item[0] in ("end", "failed", "lost", "absent"):
                return

    def release(self) -> None:
        """Forget what does the calls, and all memory."""
        self._memory = _HeldRows()
        del self._call

    def interrupt(self) -> None:
        """End the training under way at its next step."""
        request_stop(signal.SIGINT, None)

    def _make(self, index: int, make: Any) -> None:
        self._call = ray.cloudpickle.loads(ray.get(make))(index)  # from the driver, never from a file

    def _do(self, message: RayCall, say: Callable[[Any], None]) -> None:
        try:
            inputs = _ArrayStates(message.inputs, self._memory)
            payload = pickle.loads(message.payload)  # noqa: TID251 - from the driver, never from a file
            answer = self._call(payload, inputs, lambda value: say(("note", ray.cloudpickle.dumps(value))))
            self._answer(message.number, answer, inputs.is_taken, say)
        except _AbsentInput as absent:
            say(("absent", absent.position))
        except Exception as error:
            say(_failure(error))
        except BaseException:
            os._exit(1)  # as it would end any other process

    def _answer(self, number: int, answer: Answer, is_taken: bool, say: Callable[[Any], None]) -> None:
        data, state = ray.cloudpickle.dumps(answer.data), answer.state
        rows = {} if state is None else state.optimizer_rows
        if state is None:
            say(("done", (data, None, True)))
        else:
            say(("done", (data, rest_to_wire(state), State(0, {}, optimizer_rows=rows).is_finite(optimizer=True))))
            say(to_arrays(state.rows))
            say(to_arrays(state.optimizer_rows))
            on_cpu = all(row.device.type == "cpu" for row in (*state.rows.values(), *state.optimizer_rows.values()))
            if is_taken and on_cpu:  # else it may show memory that is not this process's own
                self._memory = _HeldRows(dict(state.rows), dict(state.optimizer_rows), number)
        say(("end", None))


def _failure(error: Exception) -> Item:
    if isinstance(error, ResourceError) or (is_shortage(error) and user_traceback(error) is None):
        return "lost", str(shortage("it has too little of something", error)).rstrip(".")
    return "failed", _described(error)


def _described(error: Exception) -> str:
    """Return an error as text: not every exception survives the way back."""
    own = user_traceback(error)
    if own and not shows_all_frames():
        return own
    return "".join(traceback.format_exception(error))
