"""Spawned processes that wait for jobs: the death of one is noticed at once, and another takes its place.

Not those of `concurrent.futures`, whose pool gives up as a whole when one process dies, says nothing of a process that
never starts, and has no way to hand over memory.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from forkmerge.engine.executors.executor import WorkerError
from forkmerge.engine.executors.resources import is_shortage, shortage
from forkmerge.engine.executors.shared_memory import Memory, Parcel, receive, send
from forkmerge.engine.executors.worker_process import BROKEN, Handler, serve
from forkmerge.errors import ProblemError, ResourceError

_START_LIMIT = 50.0  # seconds until a process has imported this module; torch takes a few
_STARTS = 2  # a process killed while it starts, for whatever reason, is started once more
_GLANCE = 1.0  # seconds between looks at exit codes: a dead worker's own children may keep its pipes open


@dataclass(frozen=True)
class WorkerEvent:
    """What a worker has to say.

    Args:
        worker: The worker.
        kind: "news", "done", "failed" (the value is the traceback) or "died" (the value says how).
        job: The job it had in hand.
        value: What belongs to it.
        memories: Memory that came along.
    """

    worker: Worker
    kind: str
    job: Any
    value: Any
    memories: list[Memory] = field(default_factory=list)


class Worker:
    """A process, and the job it has in hand.

    Args:
        index: Its position in the team.
    """

    def __init__(self, index: int) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        # Not a daemon: those may not have children, and a training run may read its data in processes of its own.
        self.process: BaseProcess = context.Process(target=serve, args=(other,), name=f"worker {index}")
        try:
            with _interrupts_blocked():
                self.process.start()
        except BaseException:
            self.connection.close()
            raise
        finally:
            other.close()
        self.index, self.job, self.knows = index, None, set[str]()
        self.reason: str | None = None  # why it ends, where it has said so
        self.is_up = self.is_ready = False
        self.since = time.monotonic()

    @property
    def is_free(self) -> bool:
        """Whether it can take a job."""
        return self.is_ready and self.job is None

    def prepare(self, parcel: Parcel) -> None:
        """Send it the function `(index) -> Handler`, which the process calls once."""
        self._send((self.index, parcel.places), [parcel.memory])

    def begin(self, job: Any, message: Any, memories: Sequence[Memory] = ()) -> None:
        """Hand over a job: the message goes to the process, the job comes back with its events."""
        self.job = job
        self._send(message, memories)

    def _send(self, message: Any, memories: Sequence[Memory]) -> None:
        try:
            send(self.connection, message, memories)
        except (OSError, MemoryError) as error:
            if is_shortage(error):  # which would leave it waiting for the rest
                raise shortage("a worker process cannot be told what to do", error) from error
            # Otherwise it has died: its exit code will say so.

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.terminate()
        self.process.join(5)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.connection.close()


class Team:
    """Worker processes that live as long as the team; starting them takes seconds, in which others may be busy.

    Once a process is up it may take as long as it likes to begin: problems may be slow to make.

    Args:
        count: How many processes.
    """

    def __init__(self, count: int) -> None:
        self._parcel: Parcel | None = None
        self._is_interrupted = False
        self._starts = [0] * count
        self.workers: list[Worker] = []
        try:
            for index in range(count):
                self._add(index)
        except BaseException:
            self.close()
            raise

    def start(self, make: Callable[[int], Handler]) -> None:
        """Let every process make what does its jobs: `make` must pickle."""
        self._parcel = _parcel_of(make)
        for worker in self.workers:
            worker.prepare(self._parcel)

    def free(self) -> list[Worker]:
        """The workers that can take a job now."""
        return [worker for worker in self.workers if worker.is_free]

    def events(self) -> list[WorkerEvent]:
        """Wait until something happens and return it; a worker that died has been replaced by then."""
        events: list[WorkerEvent] = []
        while not events:
            watched = {w.connection: w for w in self.workers} | {w.process.sentinel: w for w in self.workers}
            woken = {id(watched[item]) for item in wait(list(watched), _GLANCE)}  # type: ignore[index]  # as they went
            for worker in list(self.workers):
                if worker.process.exitcode is not None:
                    events += self._replace_dead(worker)
                elif id(worker) in woken and worker.connection.poll():
                    events += self._listen(worker)
                elif not worker.is_up and time.monotonic() - worker.since > _START_LIMIT:
                    raise ProblemError(_cannot_start(f"nothing was heard of it for {_START_LIMIT:g} seconds"))
            if self.free():
                break  # a process that has become ready is reason enough to look for work
        return events

    def interrupt(self) -> None:
        """Send a SIGINT to every process that can do jobs: it ignores it, unless what does its jobs knows better."""
        self._is_interrupted = True
        for worker in self.workers:
            pid = worker.process.pid
            if worker.is_ready and pid is not None and os.name == "posix":  # elsewhere that would end the process
                with suppress(OSError):
                    os.kill(pid, signal.SIGINT)

    def close(self) -> None:
        """End all processes, all at once: one that trains may take a moment to write a checkpoint."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.end()

    def _listen(self, worker: Worker) -> list[WorkerEvent]:
        try:
            message, memories = receive(worker.connection)
        except Exception as error:
            if is_shortage(error):  # here: another worker's answer would fare no better
                raise shortage("a worker's answer cannot be received", error) from error
            worker.process.join(_GLANCE)
            if worker.process.exitcode is not None:
                return []  # its exit code comes next
            worker.reason = f"an answer that cannot be read ({error or type(error).__name__})"
            return self._replace_dead(worker)  # it lives, and nobody will ever know what it has said
        return self._note(worker, message, memories)

    def _note(self, worker: Worker, message: tuple[str, Any], memories: list[Memory]) -> list[WorkerEvent]:
        kind, value = message
        if kind == "up":
            worker.is_up = True
        elif kind == "lost":
            worker.reason = value
        elif kind == "ready":
            worker.is_ready, self._starts[worker.index] = True, 0
            if self._is_interrupted:
                self.interrupt()  # which it could not hear before
        elif not worker.is_ready:
            raise WorkerError(value)
        else:
            job = worker.job
            if kind != "news":
                worker.job = None
            return [WorkerEvent(worker, kind, job, value, memories)]
        return []

    def _replace_dead(self, worker: Worker) -> list[WorkerEvent]:
        """Put a new process in the place of one that has died, or of one that nobody understands."""
        if not worker.is_ready:
            with suppress(*BROKEN):
                while True:
                    self._note(worker, *receive(worker.connection))  # what it said last, if anything, is the error
            self._starts[worker.index] += 1
        reason = worker.reason or _exit(worker.process)
        is_given_up = self._starts[worker.index] == _STARTS
        if is_given_up and not any(other.is_ready for other in self.workers):
            if worker.reason is not None:
                raise ResourceError(f"a worker process could not start: {reason}.")
            raise ProblemError(_cannot_start(f"it ended with {reason}"))
        worker.end()
        self.workers.remove(worker)
        if is_given_up:
            self._go_on_with_fewer(reason)
        else:
            self._add(worker.index, since=None if worker.is_ready else worker.since)
        return [WorkerEvent(worker, "died", worker.job, reason)] if worker.job is not None else []

    def _add(self, index: int, since: float | None = None) -> None:
        """Start a process, or go on without it where others have been started."""
        try:
            worker = Worker(index)
        except (OSError, MemoryError) as error:
            if not self.workers:
                raise shortage("no worker process can be started", error) from error
            self._go_on_with_fewer(str(shortage("it cannot be started", error)).rstrip("."))
            return
        worker.since = since or worker.since  # both starts together have as long as one
        self.workers.append(worker)
        self.workers.sort(key=lambda each: each.index)
        if self._parcel is not None:
            worker.prepare(self._parcel)

    def _go_on_with_fewer(self, reason: str) -> None:
        count = len(self.workers)
        warnings.warn(
            f"a worker process is missing: {reason}. Going on with {count} worker{'s' * (count > 1)}; the bits are "
            "the same.",
            stacklevel=2,
        )


def _parcel_of(make: Callable[[int], Handler]) -> Parcel:
    try:
        parcel = Parcel(make)
    except ResourceError:
        raise
    except Exception as error:
        raise ProblemError(
            f"worker processes need a problem, model and optimizer that pickle: {error}. Use module-level functions "
            "and classes instead of lambdas and local ones, or workers=1."
        ) from None
    if names := list(dict.fromkeys(parcel.interactive)):
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ProblemError(
            f"{shown}: defined in a notebook or at a prompt, which worker processes cannot import. Write them to a "
            "file, such as my_problem.py, and import them from there, or use workers=1."
        )
    return parcel


def _cannot_start(why: str) -> str:
    return (
        f"a worker process could not start: {why}. Look above for what it printed; a script that trains needs "
        'if __name__ == "__main__": around its calls, because every worker imports it. workers=1 needs no processes.'
    )


def _exit(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"{name} (out of memory?)" if name == "SIGKILL" else name
    return f"exit code {code}"


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Let what starts inside begin without hearing Ctrl-C: it could only show a traceback before it can ignore it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
