"""Calls in worker processes that share this one's memory: the same bits as one after the other here, in less time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, finalize

from forkmerge.engine.executors.executor import Call, Executor, Handle, Inputs, Tell, WorkerError, WorkerLost
from forkmerge.engine.executors.shared_memory import Memory
from forkmerge.engine.executors.shared_rows import Address, Rows, SharedRows, WorkerRows
from forkmerge.engine.executors.state_bytes import Wire, from_wire, rest_to_wire, rows_of, take_rest, with_rows
from forkmerge.engine.executors.worker_team import Team, Worker, WorkerEvent
from forkmerge.engine.training.state import State


@dataclass(frozen=True)
class _Message:
    """A call as it is sent to a worker.

    Args:
        payload: What it is about.
        inputs: Its states, without their rows, and where these are.
        spare: Rows like those of the first, to work in.
        gone: Memory that the worker need not keep.
    """

    payload: Any
    inputs: list[tuple[Wire, Address]]
    spare: Address
    gone: list[str]


@dataclass(eq=False, repr=False)
class _ProcessHandle(Handle):
    """A state in shared memory, or a call and the state that it ends with.

    Args:
        name: What it is.
        payload: What a call is about.
        inputs: Its states, until it has ended.
        note: Called with what it tells.
        status: "waiting", "done", "failed" or "died".
        value: A call's data, its traceback, or how its worker ended.
        rest: The state without its rows.
        rows: Its rows; none if it is spent.
        lender: The state that was put, whose own rows these are, or
        copies: those of them that are copies from another device, given back with the handle.
        spare: The rows that the call works in while it runs.
    """

    name: str
    payload: Any = None
    inputs: Sequence[_ProcessHandle] = ()
    note: Tell = lambda value: None
    status: str = "waiting"
    value: Any = None
    rest: Wire | None = None
    rows: Rows = field(default_factory=dict)
    lender: State | None = None
    copies: Rows = field(default_factory=dict)
    spare: Rows = field(default_factory=dict)

    @property
    def spoiler(self) -> _ProcessHandle | None:
        """The call that failed or was lost: itself or, before it can begin, what it waits for."""
        if self.status in ("failed", "died"):
            return self
        return next((spoiler for each in self.inputs if (spoiler := each.spoiler) is not None), None)

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.status == "done" or self.spoiler is not None


class ProcessExecutor(Executor):
    """Does calls in processes of this machine, which start with the executor and end with it.

    A state's rows are put into shared memory once and stay there; a call that takes a state works in spare rows, which
    then change places with it. So nothing is copied between processes, a call whose process died can be made again, and
    all that it takes is one spare branch per worker.

    Args:
        workers: How many processes.
    """

    def __init__(self, workers: int) -> None:
        self.team, self.rows = Team(workers), SharedRows(workers)
        self.workers = len(self.team.workers)  # fewer where not all could be started
        # Weak: a call that nobody waits for any more never begins. Dicts keep their order.
        self._waiting: WeakValueDictionary[int, _ProcessHandle] = WeakValueDictionary()

    def start(self, make: Callable[[int], Call]) -> None:
        """Send every process the function that makes its calls."""
        self.team.start(partial(_CallHandler, make))

    def put(self, state: State) -> Handle:
        """Return a handle of a state whose rows are in shared memory from now on."""
        rows = self.rows.share(state)
        copies = {key: rows[key] for key, row in rows_of(state).items() if rows[key] is not row}
        rest = rest_to_wire(state)
        handle = _ProcessHandle("state", status="done", rest=rest, rows=rows, lender=state, copies=copies)
        if copies:
            finalize(handle, self.rows.give_back, copies).atexit = False
        return handle

    def submit(
        self, payload: Any, handles: Sequence[Handle] = (), *, name: str = "call", note: Tell = lambda value: None
    ) -> Handle:
        """Hand a call to the next free process."""
        handle = _ProcessHandle(name, payload, [_own(each) for each in handles], note)
        self._waiting[id(handle)] = handle
        self._begin_calls()
        return handle

    def result(self, handle: Handle) -> Any:
        """Wait for a call, while others go on."""
        call = _own(self.first_done([handle]))
        spoiler = call.spoiler
        if spoiler is None:
            data, call.value = call.value, None
            return data
        if spoiler.status == "died":
            raise WorkerLost(spoiler, spoiler.value)
        raise WorkerError(spoiler.value)

    def fetch(self, handle: Handle, into: State) -> None:
        """Exchange the rows of a state for those with which a call ended."""
        call = _own(handle)
        take_rest(into, from_wire(_rest_of(call)))
        self.rows.install(into, call.rows)
        call.rows = {}

    def close(self) -> None:
        """End all processes."""
        self.team.close()

    def interrupt(self) -> None:
        """Send every process a SIGINT, which those of a terminal have got already."""
        self.team.interrupt()

    def first_done(self, handles: Sequence[Handle]) -> Handle:
        """Wait until one of the calls has ended, and return it."""
        while True:
            for handle in handles:
                if _own(handle).has_ended:
                    return handle
            for event in self.team.events():
                self._take_in(event)
            self._begin_calls()

    def _begin_calls(self) -> None:
        for worker in self.team.free():
            ready = (call for call in self._waiting.values() if all(each.status == "done" for each in call.inputs))
            call = next(ready, None)
            if call is None:
                return
            del self._waiting[id(call)]
            self._begin(worker, call)

    def _begin(self, worker: Worker, call: _ProcessHandle) -> None:
        shared, inputs = self.rows, call.inputs
        call.spare = shared.spare(inputs[0].rows) if inputs else {}
        sent = [(_rest_of(each), shared.address_of(each.rows)) for each in inputs]
        gone = [key for key in worker.knows if key not in shared.alive]
        memories = shared.unknown(worker.knows, [*(each.rows for each in inputs), call.spare])
        worker.knows = worker.knows.difference(gone).union(memory.key for memory in memories)
        worker.begin(call, _Message(call.payload, sent, shared.address_of(call.spare), gone), memories)
        call.note(None)

    def _take_in(self, event: WorkerEvent) -> None:
        call: _ProcessHandle = event.job
        if event.kind == "news":
            call.note(event.value)
            return
        call.status, call.value = event.kind, event.value
        if event.kind == "done":
            call.value, call.rest, address = event.value
            self.rows.adopt(event.memories)
            event.worker.knows |= {memory.key for memory in event.memories}
            if call.rest is not None:
                call.rows, call.spare = self.rows.find(address), {}
                for taken in call.inputs[:1]:
                    self._spend(taken)
        self.rows.give_back(call.spare)
        call.spare, call.inputs = {}, ()

    def _spend(self, handle: _ProcessHandle) -> None:
        """Use the rows of a state, in whose place another has come, for other calls."""
        if handle.lender is not None:  # which shall not show rows that others write to
            others = {key: row for key, row in rows_of(handle.lender).items() if handle.rows.get(key) is not row}
            with_rows(handle.lender, others)
        self.rows.give_back(handle.rows)
        handle.rows, handle.lender = {}, None
        handle.copies.clear()


def _own(handle: Handle) -> _ProcessHandle:
    assert isinstance(handle, _ProcessHandle), f"{handle.name} is another executor's"
    return handle


def _rest_of(handle: _ProcessHandle) -> Wire:
    assert handle.rest is not None, f"{handle.name} ended without a state"
    return handle.rest


class _CallHandler:
    """One worker process: finds states in shared memory, and leaves them there."""

    def __init__(self, make: Callable[[int], Call], index: int) -> None:
        self.call, self.rows = make(index), WorkerRows()

    def __call__(self, message: _Message, memories: list[Memory], tell: Tell) -> tuple[Any, list[Memory]]:
        """Do a call; return its data, its state without the rows, where these are, and memory made for them."""
        self.rows.note(memories, message.gone)
        answer = self.call(message.payload, _SharedStates(message, self.rows), tell)
        if answer.state is None:
            return (answer.data, None, {}), []
        address, made = self.rows.publish(rows_of(answer.state), message.spare)
        return (answer.data, rest_to_wire(answer.state), address), made


@dataclass(frozen=True)
class _SharedStates(Inputs):
    """States in shared memory, which others may be reading, and spare rows."""

    message: _Message
    memory: WorkerRows

    def read(self) -> list[State]:
        return [with_rows(from_wire(rest), self.memory.find(address)) for rest, address in self.message.inputs]

    def take(self) -> State:
        rest, address = self.message.inputs[0]
        rows = self.memory.find(self.message.spare)
        for key, row in self.memory.find(address).items():
            rows[key].copy_(row)
        return with_rows(from_wire(rest), rows)

    def scratch(self) -> State:
        rows = self.memory.find(self.message.spare)
        return State(0, {name: row for (field, name), row in rows.items() if field == "rows"})
