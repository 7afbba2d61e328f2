"""The workers of a Ray executor as the driver sees them: they start, do one call at a time, and may be lost."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from forkmerge.engine.executors.executor import WorkerError
from forkmerge.engine.executors.ray.call_thread import RayCall
from forkmerge.engine.executors.ray.cluster import check_versions, is_alive
from forkmerge.errors import ProblemError

_STARTS = 3  # a worker that ends while it starts, for whatever reason, is started again so often


@dataclass(frozen=True)
class CallEvent:
    """What came of a call, or what it tells.

    Args:
        kind: "note", "done", "failed" (the value is the traceback), "absent" (the position of an input whose node is
            gone) or "died" (the value says how).
        job: The call.
        value: What belongs to it.
        rows: Where the parameter rows of its state are, and
        optimizer_rows: those of the optimizer.
    """

    kind: str
    job: Any
    value: Any
    rows: Any = None
    optimizer_rows: Any = None


class StartFailed(RuntimeError):
    """A worker has ended again and again before it could do a call."""


@dataclass(eq=False)
class RayWorker:
    """A Ray actor, and the call it has in hand.

    Args:
        actor: Makes actors, each with what it reserves.
        index: Its position.
        make: Where the function that makes its calls is.

    Attributes:
        job: The call.
        node: The id of its node, once that is known.
        is_ready: Whether it can do calls.
        holds: The number of the call whose optimizer rows it has.
    """

    actor: Any
    index: int
    make: Any = None
    job: Any = None
    node: str = ""
    is_ready: bool = False
    process: int = 0
    starts: int = 0
    holds: int | None = None
    _handle: Any = field(default=None, init=False)
    _waits_for: Any = field(default=None, init=False)
    _end: Any = field(default=None, init=False)
    _rows: list[Any] = field(default_factory=list, init=False)
    _is_interrupted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._start()

    @property
    def is_free(self) -> bool:
        """Whether it can take a call."""
        return self.is_ready and self.job is None

    @property
    def waits_for(self) -> Any:
        """What Ray has to wait for until `advance` can say more; None if it has nothing to do."""
        return self._waits_for

    def prepare(self, make: Any) -> None:
        """Say where the function `make(index) -> call` is, as soon as the versions are known to agree."""
        self.make = make
        if self.node:
            self._waits_for = self._handle.prepare.remote(self.index, [make], list(sys.path), os.getcwd())

    def begin(self, job: Any, message: RayCall) -> None:
        """Hand over a call."""
        self.job, self._end, self._rows, self.holds = job, None, [], None
        self._waits_for = self._handle.do.options(num_returns="streaming", name=job.name).remote(message)

    def advance(self) -> CallEvent | None:
        """Take in what was waited for."""
        try:
            if self.is_ready:
                return self._take_in()
            self._go_on_starting()
            return None
        except RayTaskError as error:  # outside of the call: in Ray's own part, or in the actor's
            if not self.is_ready:
                raise WorkerError(str(error)) from None
            return self._lost(_last_line(error))
        except RayActorError as error:
            return self._lost(self._reason(error))
        except RayError as error:
            return self._lost(_last_line(error))

    def interrupt(self) -> None:
        """Ask it to end what it trains early."""
        self._is_interrupted = True
        if self.is_ready:
            self._handle.interrupt.remote()

    def rest(self) -> bool:
        """Forget what does its calls, so that another executor can use the actor; False if that cannot be."""
        if self._is_interrupted or (self.make is not None and not self.is_free):
            return False
        if self.make is not None:
            self._handle.release.remote()
        self.is_ready, self.make, self.holds = False, None, None
        return True

    def end(self) -> None:
        """End the actor, whatever it does."""
        if self._handle is not None:
            ray.kill(self._handle)
        self._handle = self._waits_for = None

    def _start(self) -> None:
        self.node, self.is_ready, self.job, self.holds = "", False, None, None
        self._handle = self.actor.remote()
        self._waits_for = self._handle.facts.remote()

    def _go_on_starting(self) -> None:
        if not self.node:
            versions, node, self.process = ray.get(self._waits_for)
            check_versions(versions, _address(node))
            self.node, self._waits_for = node, None
            if self.make is not None:
                self.prepare(self.make)
            return
        kind, why = ray.get(self._waits_for)
        if kind == "refused":
            raise ProblemError(why)
        if kind == "failed":
            raise WorkerError(why)
        self._waits_for, self.is_ready, self.starts = None, True, 0

    def _take_in(self) -> CallEvent | None:
        try:
            item = next(self._waits_for)
        except StopIteration:  # before the end: what came last is why
            ray.get(self._rows)
            return self._lost("a stream that broke off")
        if self._end is not None and len(self._rows) < 2 and self._end[1] is not None:
            self._rows.append(item)
            return None
        kind, value = ray.get(item)
        if kind == "note":
            return CallEvent("note", self.job, _loads(value))
        if kind == "done":
            self._end = value
            return None
        if kind == "lost":
            return self._lost(f"{value} on node {_address(self.node)}")
        job, self.job, self._waits_for = self.job, None, None
        if kind != "end":
            return CallEvent(kind, job, value)
        data, rest, are_finite = self._end
        rows, optimizer_rows = self._rows or (None, None)
        self._end, self._rows = None, []
        return CallEvent("done", job, (_loads(data), rest, are_finite), rows, optimizer_rows)

    def _lost(self, reason: str) -> CallEvent | None:
        """Put a new actor in the place of one that is gone."""
        job, was_ready = self.job, self.is_ready
        self.end()
        self.starts += 1
        if self.starts > _STARTS and not was_ready:
            raise StartFailed(reason)
        self._start()
        return CallEvent("died", job, reason) if job is not None else None

    def _reason(self, error: RayActorError) -> str:
        where = f"on node {_address(self.node)}" if self.node else ""
        if self.node and not is_alive(self.node):
            return f"the loss of node {_address(self.node)}"
        memory = " (out of memory)" if "out of memory" in str(error).lower().replace("oom", "") else ""
        if not self.node:
            return _last_line(error)
        return f"the loss of its process {self.process} {where}{memory}"


def loss_of_state(*nodes: str) -> str:
    """Say that a state is lost, and of which of these nodes; without any, it was put on this process's own."""
    held_by = nodes or (ray.get_runtime_context().get_node_id(),)
    for node in held_by:
        if not is_alive(node):
            return f"the loss of node {_address(node)}, which had its state"
    return f"the loss of its state on node {_address(held_by[0])}"


def _address(node: str) -> str:
    """Return how people call a node: its address, and the beginning of its id, as two may share an address."""
    addresses = [each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node]
    return f"{addresses[0] if addresses else 'unknown'} ({node[:8]})"


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].rstrip(".")


def _loads(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: TID251 - from a worker that this process started, never from a file
