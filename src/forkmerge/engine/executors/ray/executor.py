"""Calls on a Ray cluster: states stay where they were computed until somebody needs them elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray.exceptions import ObjectLostError
from torch import Tensor

from forkmerge.engine.executors.executor import Call, Executor, Handle, Tell, WorkerError, WorkerLost
from forkmerge.engine.executors.ray.actor import actor_class
from forkmerge.engine.executors.ray.arrays import KnownRows, copy_rows, to_arrays, to_rows
from forkmerge.engine.executors.ray.call_thread import RayCall
from forkmerge.engine.executors.ray.cluster import Cluster, let_rest, shortfall, take_resting
from forkmerge.engine.executors.ray.handle import RayHandle
from forkmerge.engine.executors.ray.options import Ray
from forkmerge.engine.executors.ray.workers import CallEvent, RayWorker, StartFailed, loss_of_state
from forkmerge.engine.executors.state_bytes import from_wire, rest_to_wire, take_rest
from forkmerge.engine.training.remote_rows import RemoteRows
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError

_GLANCE = 1.0  # seconds between looks at the clock
_START_LIMIT = 300.0  # seconds until the first worker is up; a cluster may have to start a machine for it
_LONGEST = 8  # calls that would have to be made again, one after the other, if a node were lost
_numbers = count(1)


class RayExecutor(Executor):
    """Does calls in Ray actors, which start with the executor and end with it.

    Rows are objects of Ray's store, one of all parameter rows and one of the optimizer's: a worker that needs them gets
    them once per node. They outlive the worker that computed them, not its node. The optimizer's stay there until
    somebody here reads them: for a checkpoint, or to average them. Those that go with a node are made again from what
    was read last, by the same calls.

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
        self._waiting: WeakValueDictionary[int, RayHandle] = WeakValueDictionary()
        # Attempts of calls that were lost, and how: one that is submitted again is the same call, and goes on counting.
        self._lost: dict[tuple[str, bytes], tuple[int, str]] = {}
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
        rows, handle = state.optimizer_rows, RayHandle("state", status="done", rest=rest_to_wire(state))
        handle.lender = State(state.step, dict(state.rows))
        handle.rows, handle.maker = self._address_of(state.rows)
        if isinstance(rows, RemoteRows) and not rows.is_here:
            handle.source = call = rows.source
            handle.optimizer_rows = call.optimizer_rows
        else:
            handle.lender.optimizer_rows = dict(rows)
            handle.optimizer_rows, call = self._address_of(rows) if rows else (None, None)
        if call is not None:
            handle.number, handle.node = call.number, call.node
        if handle.maker is not None and handle.maker is not handle.source:
            self._pin(handle)
        return handle

    def submit(
        self, payload: Any, handles: Sequence[Handle] = (), *, name: str = "call", note: Tell = lambda value: None
    ) -> Handle:
        """Hand a call to the next free worker, if it can be one on the node that has its state."""
        handle = RayHandle(name, ray.cloudpickle.dumps(payload), [_own(each) for each in handles], note)
        handle.number = next(_numbers)
        before, reason = self._lost.pop((name, handle.payload), (0, ""))
        handle.attempts += before
        if handle.attempts > self.attempts:
            handle.die(reason)
            return handle
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
            raise self._loss(spoiler)
        raise WorkerError(spoiler.value)

    def fetch(self, handle: Handle, into: State) -> None:
        """Copy the state with which a call ended; Ray's own memory is nobody's to write to."""
        call = _own(handle)
        sent = call.sent()
        try:
            rows = ray.get(call.rows)
        except ObjectLostError:
            call.die(loss_of_state(*call.nodes))
            raise self._loss(call) from None
        for each in call.made_from:
            each.end_loan()
        into.rows = copy_rows(rows, into.rows)
        take_rest(into, from_wire(sent.rest))
        self._known.note(into.rows, (call.rows, call))
        old = into.optimizer_rows
        memory = old.memory if isinstance(old, RemoteRows) else dict(old)
        rows = RemoteRows(partial(self._bring, call), call, are_finite=call.are_finite, memory=memory)
        into.optimizer_rows = rows
        if call.depth >= _LONGEST:
            _ = rows.here

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

    def _address_of(self, rows: Mapping[str, Tensor], *, anew: bool = False) -> tuple[Any, RayHandle | None]:
        """Return where rows are, and the call that left them there; those that are nowhere are put."""
        address = None if anew else self._known.find(rows)
        if address is None:
            address = ray.put(to_arrays(rows)), None
        self._known.note(rows, address)
        return address

    def _pin(self, handle: RayHandle) -> None:
        """Keep parameter rows that a call left on its node here, too, as the rows here are soon written over."""
        assert handle.lender is not None
        try:
            handle.weights = ray.get(handle.rows)
        except ObjectLostError:
            handle.rows, handle.maker = self._address_of(handle.lender.rows, anew=True)

    def _bring(self, call: RayHandle, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer's rows of a call; if they went with their node, it is made again."""
        while True:
            try:
                arrays = ray.get(call.optimizer_rows)
                break
            except ObjectLostError:
                call.value = loss_of_state(*call.nodes)
                self._make_again(call)
        rows = copy_rows(arrays, memory)
        self._known.note(rows, (call.optimizer_rows, call))
        call.made_from = ()
        return rows

    def _begin_calls(self) -> None:
        free = [worker for worker in self._workers if worker.is_free]
        for call in list(self._waiting.values()):
            if not free:
                return
            if any(each.status != "done" for each in call.inputs):
                continue
            del self._waiting[call.number or 0]
            worker = self._choose(free, call)
            free.remove(worker)
            worker.begin(call, RayCall(call.number or 0, call.payload, [each.sent() for each in call.inputs]))
            call.note(None)

    def _choose(self, free: Sequence[RayWorker], call: RayHandle) -> RayWorker:
        """Return the worker that has the optimizer's rows, or one of its node, or one that no other call wants."""
        numbers, nodes = {each.number for each in call.inputs}, {each.node for each in call.inputs if each.node}
        wanted = {each.number for other in self._waiting.values() for each in other.inputs}
        holders = [worker for worker in free if worker.holds is not None and worker.holds in numbers]
        near = [worker for worker in free if worker.node in nodes and worker.holds not in wanted]
        others = [worker for worker in free if worker.holds not in wanted]
        return (holders or near or others or list(free))[0]

    def _wait(self) -> None:
        """Wait until something happens, and take it in."""
        busy = {worker.waits_for: worker for worker in self._workers if worker.waits_for is not None}
        assert busy, "nothing is under way"
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=_GLANCE, fetch_local=False)
        absent: list[tuple[RayHandle, RayHandle]] = []
        for item in ready:
            worker = busy[item]
            try:
                event = worker.advance()
            except StartFailed as error:
                raise ProblemError(f"a worker on Ray could not start: {error}.") from None
            if event is not None and event.kind == "absent":
                absent.append((event.job, event.job.inputs[event.value]))
            elif event is not None:
                self._take_in(event, worker)
        for call, lost in absent:  # which may take further waits
            self._replace_input(call, lost)
        self._check_start()

    def _check_start(self) -> None:
        if any(worker.node for worker in self._workers):
            self._since = time.monotonic()
        elif time.monotonic() - self._since > _START_LIMIT:
            asked = shortfall(self.workers, self.options.num_cpus, self.options.num_gpus)
            raise ProblemError(f"no worker has started for {_START_LIMIT:g} seconds: {asked}. Ask for less.")

    def _take_in(self, event: CallEvent, worker: RayWorker) -> None:
        call: RayHandle = event.job
        if event.kind == "note":
            call.note(event.value)
            return
        call.status, call.value = event.kind, event.value
        if event.kind == "done":
            call.value, call.rest, call.are_finite = event.value
            call.rows, call.optimizer_rows, call.node = event.rows, event.optimizer_rows, worker.node
            if call.rest is not None:
                worker.holds, call.made_from = call.number, call.inputs
        call.inputs = ()

    def _replace_input(self, call: RayHandle, lost: RayHandle) -> None:
        """Let a call wait for a state that went with its node: put again from here, or a call to make again.

        A loss is an attempt of the call that left the state or, where this process put it, of the one that reads it: it
        does not go on for ever where a node gives nobody what it has.
        """
        reason = loss_of_state(*lost.nodes)
        if lost.lender is None:
            lost.die(reason)
            return
        if lost.source is not None:
            if lost.optimizer_rows is lost.source.optimizer_rows:
                lost.source.value = reason
                self._make_again(lost.source)
            lost.optimizer_rows, lost.node = lost.source.optimizer_rows, lost.source.node
        elif call.attempts >= self.attempts:
            call.die(reason)
            return
        else:
            call.attempts += 1
            if lost.optimizer_rows is not None:
                lost.optimizer_rows, _ = self._address_of(lost.lender.optimizer_rows, anew=True)
                lost.number, lost.node = None, ""
        if lost.maker is not None and lost.maker is lost.source:
            lost.rows = lost.source.rows
        elif rows := lost.lender.rows if lost.weights is None else to_rows(lost.weights):
            lost.rows, lost.maker = self._address_of(rows, anew=True)
        self._waiting[call.number or 0] = call

    def _loss(self, call: RayHandle) -> WorkerLost:
        """Return what to raise for a call that died, which may be submitted again."""
        self._lost[call.name, call.payload] = call.attempts, call.value
        return WorkerLost(call, call.value)

    def _make_again(self, call: RayHandle) -> None:
        """Make a call again that has ended, and those before it whose states are gone, too; the state is the same."""
        step = call.step
        while True:
            if call.attempts >= self.attempts:
                raise ProblemError(
                    f"{call.name} was done {call.attempts} times, the last with {call.value}. What is in the run's "
                    "folder is intact: resume it."
                )
            call.again()
            self._waiting[call.number or 0] = call
            self._begin_calls()
            self.first_done([call])
            spoiler = call.spoiler
            if spoiler is None:
                call.value = None
                if call.step != step:  # it was cut short by a request to stop, once or now
                    raise ProblemError(f"{call.name} was lost while the run was asked to stop: resume it.")
                return
            if spoiler.status == "failed":
                raise WorkerError(spoiler.value)
            if spoiler is not call:
                call.attempts -= 1
                self._make_again(spoiler)


def _own(handle: Handle) -> RayHandle:
    assert isinstance(handle, RayHandle), f"{handle.name} is another executor's"
    return handle
