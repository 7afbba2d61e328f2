"""Where branches run: in this process, one after the other, or in spawned worker processes.

Both are `concurrent.futures.Executor`s, and give the same bits for the same number of threads per branch.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from typing import Any

import safetensors.torch
import torch
from torch import nn

from forkmerge.branch import BranchResult, Mixture, Training, train_branch
from forkmerge.codec import pack, unpack
from forkmerge.errors import ProblemError
from forkmerge.problem import Problem
from forkmerge.state import State
from forkmerge.workbench import Workbench


@dataclass
class Job:
    """What every worker needs to know once.

    Args:
        problem: The sealed problem.
        model: The module as it is before training.
        training: Options common to all branches.
        seed: The run's seed.
        threads: Threads per branch.
        rebuild: Makes the problem anew in a worker, where pickling it would be slow or impossible.
    """

    problem: Problem
    model: nn.Module
    training: Training
    seed: int
    threads: int
    rebuild: Callable[[], Problem] | None = None

    def problem_for(self, phase: str) -> Problem:
        """The problem of a phase: a refit trains on the validation labels, too."""
        return self.problem.with_validation_labels() if phase == "refit" else self.problem


@dataclass(frozen=True)
class Segment:
    """A stretch of training of one branch: a pure function of these fields."""

    phase: str
    mixture: Mixture
    steps: int


class WorkerError(RuntimeError):
    """Something failed in a worker process; the message is the traceback from there."""


class Serial(Executor):
    """Runs every call at once, in the caller's process: the reference for all other executors."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the call and return its finished future."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Crew:
    """Trains the branches of a job on an executor."""

    def __init__(self, job: Job, bench: Workbench, executor: Executor) -> None:
        self.job, self.bench, self.executor = job, bench, executor
        self._problems: dict[str, Problem] = {}

    @property
    def is_serial(self) -> bool:
        """Whether branches run one after the other in this process."""
        return isinstance(self.executor, Serial)

    def problem(self, phase: str) -> Problem:
        """The problem of a phase, built once."""
        if phase not in self._problems:
            self._problems[phase] = self.job.problem_for(phase)
        return self._problems[phase]

    def train(self, segments: Sequence[Segment], states: Sequence[State]) -> Iterator[BranchResult]:
        """Train every branch for its segment; results come in the order of the branches."""
        if self.is_serial:
            for segment, state in zip(segments, states, strict=True):
                yield self._train_here(segment, state)
            return
        futures = [
            self.executor.submit(_train_in_worker, segment, to_wire(state))
            for segment, state in zip(segments, states, strict=True)
        ]
        for future in futures:
            try:
                answer = future.result()
            except BrokenProcessPool as error:
                raise ProblemError(
                    "a worker process died (out of memory?). What is in the run's folder is intact: resume it, with "
                    "fewer workers."
                ) from error
            if isinstance(answer, str):
                raise WorkerError(answer)
            wire, result = answer
            yield replace(result, state=self.bench.place(from_wire(wire)))

    def _train_here(self, segment: Segment, state: State) -> BranchResult:
        job = self.job
        return train_branch(
            self.bench,
            self.problem(segment.phase),
            segment.mixture,
            state,
            steps=segment.steps,
            training=job.training,
            seed=job.seed,
        )


@contextmanager
def open_crew(job: Job, workers: int) -> Iterator[Crew]:
    """Yield a crew of one (serial) or several worker processes, with the job's number of threads each.

    An in-memory problem must pickle to reach a worker; that is checked here, before any training.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        if workers == 1:
            yield Crew(job, job.training.bench(job.model), Serial())
            return
        payload = _pickled(job)
        bench = job.training.bench(job.model)
        pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=(payload,))
        try:
            yield Crew(job, bench, pool)
        except BaseException:
            # Segments under way are of no use to anybody now; checkpoints are on disk.
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    finally:
        torch.set_num_threads(before)


def _pickled(job: Job) -> bytes:
    sent = job if job.rebuild is None else replace(job, problem=None)  # type: ignore[arg-type]  # rebuilt there
    try:
        return pickle.dumps(sent)
    except Exception as error:
        raise ProblemError(
            f"worker processes need a problem, model and optimizer that pickle: {error}. Use module-level functions "
            "and classes instead of lambdas and local ones, or workers=1."
        ) from None


_worker: Crew | None = None  # set once per worker process by its initializer
_failure = ""  # or why it could not be


def _start_worker(payload: bytes) -> None:
    global _worker, _failure
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the run
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        job: Job = pickle.loads(payload)  # noqa: TID251 - sent by our own parent process, never read from a file
        if job.rebuild is not None:
            job.problem = job.rebuild()
        torch.set_num_threads(job.threads)
        _worker = Crew(job, job.training.bench(job.model), Serial())
    except Exception:
        _failure = traceback.format_exc()  # told by the first segment: an initializer cannot answer


def _end_with_parent() -> None:
    """Wait for the parent's end: killed outright, it cannot end its workers, which would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _train_in_worker(segment: Segment, wire: tuple[Any, bytes]) -> tuple[Any, BranchResult] | str:
    """Return the state and the rest of the result, or the traceback: not every exception survives the way back."""
    try:
        if _worker is None:
            return _failure
        result = _worker._train_here(segment, _worker.bench.place(from_wire(wire)))
        return to_wire(result.state), replace(result, state=State(0, {}))
    except Exception:
        return traceback.format_exc()


def to_wire(state: State) -> tuple[Any, bytes]:
    """Return a state as plain JSON data and bytes."""
    value, tensors = pack(state.to_value())
    return value, safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})


def from_wire(wire: tuple[Any, bytes]) -> State:
    """Return the state that `to_wire` described."""
    value, data = wire
    return State.from_value(unpack(value, safetensors.torch.load(data)))
