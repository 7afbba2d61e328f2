"""Calls on a Ray cluster: states stay where they were computed until somebody needs them elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray.exceptions import ObjectLostError
from torch import Tensor

from forkmerge.engine.executors.executor import Call, Executor, Handle, Tell, WorkerError, WorkerLost
from forkmerge.engine.executors.ray.actor import actor_class
from forkmerge.engine.executors.ray.arrays import KnownRows, copy_rows, to_arrays
from forkmerge.engine.executors.ray.call_thread import RayCall, SentState
from forkmerge.engine.executors.ray.cluster import Cluster, let_rest, shortfall, take_resting
from forkmerge.engine.executors.ray.options import Ray
from forkmerge.engine.executors.ray.workers import CallEvent, RayWorker, StartFailed
from forkmerge.engine.executors.state_bytes import Wire, from_wire, rest_to_wire, take_rest
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError

_GLANCE = 1.0  # seconds between looks at the clock
_START_LIMIT = 300.0  # seconds until the first worker is up; a cluster may have to start a machine for it
_numbers = count(1)


@dataclass(eq=False, repr=False)
class _RayHandle(Handle):
    """A state in the cluster, or a call and the state that it ends with.

    Args:
        name: What it is.
        payload: What a call is about, pickled.
        inputs: Its states, until it has ended.
        note: Called with what it tells.
        status: "waiting", "done", "failed" or "died".
        value: A call's data, its traceback, or how its worker ended.
        rest: The state without its rows.
        rows: Where its parameter rows are, and
        optimizer_rows: those of its optimizer.
        node: The node that holds them.
        number: Of the call, for the worker that may hold what it ended with.
        lender: The state that was put, whose rows this process has whatever happens to others.
    """

    name: str
    payload: bytes = b""
    inputs: Sequence[_RayHandle] = ()
    note: Tell = lambda value: None
    status: str = "waiting"
    value: Any = None
    rest: Wire | None = None
    rows: Any = None
    optimizer_rows: Any = None
    node: str = ""
    number: int | None = None
    lender: State | None = None

    @property
    def spoiler(self) -> _RayHandle | None:
        """The call that failed or was lost: itself or, before it can begin, what it waits for."""
        if self.status in ("failed", "died"):
            return self
        return next((spoiler for each in self.inputs if (spoiler := each.spoiler) is not None), None)

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.status == "done" or self.spoiler is not None

    def sent(self) -> SentState:
        """The state as it is sent: where it is."""
        assert self.rest is not None, f"{self.name} ended without a state"
        optimizer_rows = [] if self.optimizer_rows is None else [self.optimizer_rows]
        return SentState(self.rest, [self.rows], optimizer_rows, self.number)


class RayExecutor(Executor):
    """Does calls in Ray actors, which start with the executor and end with it.

    Rows are objects of Ray's store, one of all parameter rows and one of the optimizer's: a worker that needs them gets
    them once per node. They outlive the worker that computed them, not its node.

    Args:
        options: Which cluster, and what a worker needs.
        workers: How many.
    """

    def __init__(self, options: Ray, workers: int) -> None:
        self.options, self.workers, self.attempts = options, workers, options.attempts
        self._cluster: Cluster | None = Cluster(options)
        self._workers: list[RayWorker] = []
        self._known = KnownRows()
        # Weak: a call that nobody waits for any more never begins. Dicts keep their order.
        self._waiting: WeakValueDictionary[int, _RayHandle] = WeakValueDictionary()
        self._since = time.monotonic()
        try:
            actor = actor_class().options(
                num_cpus=options.num_cpus, num_gpus=options.num_gpus, scheduling_strategy="SPREAD"
            )
            self._workers = take_resting(options, workers)
            for index, worker in enumerate(self._workers):
                worker.index = index
            self._workers += [RayWorker(actor, index) for index in range(len(self._workers), workers)]
        except BaseException:
            self.close()
            raise

    def start(self, make: Callable[[int], Call]) -> None:
        """Put what makes the calls where every worker finds it."""
        try:
            pickled = ray.cloudpickle.dumps(make)
        except Exception as error:
            raise ProblemError(
                f"workers on Ray need a problem, model and optimizer that pickle: {error}. Name the problem as "
                "module:factory, so that workers make it themselves, or leave out what cannot be sent."
            ) from None
        self._make = ray.put(pickled)
        for worker in self._workers:
            worker.prepare(self._make)

    def put(self, state: State) -> Handle:
        """Return a handle of a state, of which the rows that are in the cluster already stay there."""
        lender = State(state.step, dict(state.rows), optimizer_rows=dict(state.optimizer_rows))
        handle = _RayHandle("state", status="done", rest=rest_to_wire(state), lender=lender)
        self._put_rows(lender, handle)
        return handle

    def submit(
        self, payload: Any, handles: Sequence[Handle] = (), *, name: str = "call", note: Tell = lambda value: None
    ) -> Handle:
        """Hand a call to the next free worker, if it can be one on the node that has its state."""
        handle = _RayHandle(name, ray.cloudpickle.dumps(payload), [_own(each) for each in handles], note)
        handle.number = next(_numbers)
        self._waiting[handle.number] = handle
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
        """Copy the state with which a call ended; Ray's own memory is nobody's to write to."""
        call = _own(handle)
        sent = call.sent()
        try:
            rows = ray.get(call.rows)
            optimizer_rows = ray.get(call.optimizer_rows)
        except ObjectLostError:
            call.status, call.value = "died", "the loss of the node that had its state"
            raise WorkerLost(call, call.value) from None
        into.rows = copy_rows(rows, into.rows)
        into.optimizer_rows = copy_rows(optimizer_rows, into.optimizer_rows)
        take_rest(into, from_wire(sent.rest))
        self._known.note(into.rows, call.rows)
        self._known.note(into.optimizer_rows, call.optimizer_rows)

    def close(self) -> None:
        """End all workers, and leave the cluster."""
        if self._cluster is not None:
            resting = [worker for worker in self._workers if self._cluster.is_shared and worker.rest()]
            for worker in self._workers:
                if worker not in resting:
                    worker.end()
            let_rest(self.options, resting)
            self._workers = []
            self._cluster.close()
            self._cluster = None

    def interrupt(self) -> None:
        """Ask every worker to end what it trains early."""
        for worker in self._workers:
            worker.interrupt()

    def first_done(self, handles: Sequence[Handle]) -> Handle:
        """Wait until one of the calls has ended, and return it."""
        while True:
            for handle in handles:
                if _own(handle).has_ended:
                    return handle
            self._wait()
            self._begin_calls()

    def _put_rows(self, state: State, handle: _RayHandle, *, anew: bool = False) -> None:
        handle.rows = self._address_of(state.rows, anew)
        handle.optimizer_rows = self._address_of(state.optimizer_rows, anew) if state.optimizer_rows else None

    def _address_of(self, rows: Mapping[str, Tensor], anew: bool) -> Any:
        address = None if anew else self._known.find(rows)
        if address is None:
            address = ray.put(to_arrays(rows))
        self._known.note(rows, address)
        return address

    def _begin_calls(self) -> None:
        free = [worker for worker in self._workers if worker.is_free]
        for call in list(self._waiting.values()):
            if not free:
                return
            if any(each.status != "done" for each in call.inputs):
                continue
            del self._waiting[call.number or 0]
            nodes = {each.node for each in call.inputs if each.node}
            worker = next((worker for worker in free if worker.node in nodes), free[0])
            free.remove(worker)
            worker.begin(call, RayCall(call.number or 0, call.payload, [each.sent() for each in call.inputs]))
            call.note(None)

    def _wait(self) -> None:
        """Wait until something happens, and take it in."""
        busy = {worker.waits_for: worker for worker in self._workers if worker.waits_for is not None}
        assert busy, "nothing is under way"
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=_GLANCE, fetch_local=False)
        for item in ready:
            worker = busy[item]
            try:
                event = worker.advance()
            except StartFailed as error:
                raise ProblemError(f"a worker on Ray could not start: {error}.") from None
            if event is not None:
                self._take_in(event, worker)
        self._check_start()

    def _check_start(self) -> None:
        if any(worker.node for worker in self._workers):
            self._since = time.monotonic()
        elif time.monotonic() - self._since > _START_LIMIT:
            asked = shortfall(self.workers, self.options.num_cpus, self.options.num_gpus)
            raise ProblemError(f"no worker has started for {_START_LIMIT:g} seconds: {asked}. Ask for less.")

    def _take_in(self, event: CallEvent, worker: RayWorker) -> None:
        call: _RayHandle = event.job
        if event.kind == "note":
            call.note(event.value)
        elif event.kind == "absent":
            self._replace_input(call, call.inputs[event.value])
        else:
            call.status, call.value = event.kind, event.value
            if event.kind == "done":
                call.value, call.rest = event.value
                call.rows, call.optimizer_rows, call.node = event.rows, event.optimizer_rows, worker.node
            call.inputs = ()

    def _replace_input(self, call: _RayHandle, lost: _RayHandle) -> None:
        """Let a call wait for a state that went with its node: put again from here, or a call to make again."""
        if lost.lender is None:
            lost.status, lost.value = "died", "the loss of the node that had its state"
            return
        self._put_rows(lost.lender, lost, anew=True)
        self._waiting[call.number or 0] = call


def _own(handle: Handle) -> _RayHandle:
    assert isinstance(handle, _RayHandle), f"{handle.name} is another executor's"
    return handle
