"""The branches of a run on any executor: trained, in parts that keep all workers busy, and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from forkmerge.engine.executors.branch_worker import BranchWorker, MakeBranchWorker, Segment, TrainingJob
from forkmerge.engine.executors.devices import place_model
from forkmerge.engine.executors.executor import Executor
from forkmerge.engine.executors.load_balance import Part, divide
from forkmerge.engine.executors.parallel_calls import using_threads
from forkmerge.engine.executors.pending_calls import CallLost, PendingCall, PendingCalls
from forkmerge.engine.merging.measure_candidate import Measurement, MeasureRequest
from forkmerge.engine.training.branch import BranchResult, join_results
from forkmerge.engine.training.interrupts import is_stop_requested
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.release_memory import thrifty
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError
from forkmerge.problem.batches import check_loaders

_FIRST_SHARE = 16  # the first 1/16 of the first round shows what a step of every branch takes


@dataclass
class _Branch:
    """A branch while its segment is trained.

    Args:
        segment: The steps.
        state: Takes the result.
        last: The last part that was submitted.
        submitted: Steps of the parts that were submitted.
        start: The step that its segment starts from.
        left: Steps that have not been trained.
        results: What the parts gave.
    """

    segment: Segment
    state: State
    last: PendingCall | None = None
    submitted: int = 0
    start: int = field(init=False)
    left: int = field(init=False)
    results: list[BranchResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start, self.left = self.state.step, self.segment.steps

    @property
    def key(self) -> tuple[str, ...]:
        """What its time per step is remembered by."""
        return self.segment.phase, self.segment.mixture.name, *self.segment.mixture.task_weights


class BranchExecution:
    """Trains and measures the branches of a job on an executor; the bits do not depend on which.

    Args:
        executor: Where, started with workers of this job.
        here: This process's own worker, for merges.

    Attributes:
        workers: How many branches are trained, or candidates measured, at the same time.
    """

    def __init__(self, executor: Executor, here: BranchWorker) -> None:
        self.executor, self.workers = executor, executor.workers
        self.job, self.binding, self.problem = here.job, here.binding, here.problem
        # Over all steps of a branch, because single segments are noisy on a busy machine.
        self._spent: dict[tuple[str, ...], tuple[float, int]] = {}  # seconds, steps
        self._moment = ""

    def train(self, segments: Sequence[Segment], states: Sequence[State], moment: str = "") -> Iterator[BranchResult]:
        """Train every branch for its segment, changing its state; results come in the order of the branches.

        Where a stop is requested, segments end at their next step. `moment` is for the names of calls, also of what is
        measured next: "round 3".
        """
        self._moment = moment
        branches = [_Branch(segment, state) for segment, state in zip(segments, states, strict=True)]
        calls, branch_of, next_out = PendingCalls(self.executor), dict[PendingCall, _Branch](), 0
        for parts in self._parts(branches):
            for part in parts:
                branch = branches[part.branch]
                branch_of[_submit(calls, branch, part.steps, moment)] = branch
            for call in calls:
                self._take_in(call, branch_of.pop(call))
                while next_out < len(branches) and branches[next_out].results and not branches[next_out].left:
                    yield self._joined(calls, branches[next_out])
                    next_out += 1
            if is_stop_requested():
                break
        for branch in branches[next_out:]:
            yield self._joined(calls, branch)

    def measure(self, states: Sequence[State], requests: Sequence[MeasureRequest]) -> list[Measurement]:
        """Measure combinations of states; workers share the requests, so make several at once."""
        # With the states' own dicts: rows that the executor moves to other memory are moved in the states themselves.
        weights = [self.executor.put(State(state.step, state.rows, state.buffers)) for state in states]
        calls = PendingCalls(self.executor)
        step = max(state.step for state in states)
        names = [f"{_named(self._moment)}{_coefficients(request)} at step {step}" for request in requests]
        submitted = [calls.submit(each, weights, name=name) for each, name in zip(requests, names, strict=True)]
        measured = {call: _result_of(call) for call in calls}
        return [measured[call] for call in submitted]

    def _parts(self, branches: list[_Branch]) -> Iterator[list[Part]]:
        """Yield what to train; first of all a little, where that must show how long a step of every branch takes."""
        if self.workers == 1:
            yield [Part(index, branch.left, 0.0) for index, branch in enumerate(branches)]
            return
        is_new = any(branch.key not in self._spent for branch in branches)
        shortest = min((branch.left for branch in branches), default=0)
        reads_here = not self.job.training.loader_workers  # whose processes would start anew for every part
        if is_new and len(branches) > self.workers and shortest >= _FIRST_SHARE and reads_here:
            yield [Part(index, branch.left // _FIRST_SHARE, 0.0) for index, branch in enumerate(branches)]
        # Where segments are cut depends on the clock, and no bit on where: a segment in parts is the segment.
        pace = {key: seconds / steps for key, (seconds, steps) in self._spent.items()}
        usual = max(pace.values(), default=1.0)
        costs = [pace.get(branch.key, usual) for branch in branches]
        yield divide([branch.left for branch in branches], costs, self.workers)

    def _take_in(self, call: PendingCall, branch: _Branch) -> None:
        result = BranchResult(branch.state, **_result_of(call))
        seconds, before = self._spent.get(branch.key, (0.0, 0))
        if result.steps:
            self._spent[branch.key] = (seconds + result.seconds, before + result.steps)
        branch.results.append(result)
        branch.left -= result.steps

    def _joined(self, calls: PendingCalls, branch: _Branch) -> BranchResult:
        """Return the result of a segment, its state brought here: the same as if it had not been cut."""
        assert branch.last is not None
        with _explained_loss():
            calls.fetch(branch.last, branch.state)
        self.binding.place(branch.state)
        return join_results(branch.results)


def _named(moment: str) -> str:
    return f"{moment}: " if moment else ""


def _coefficients(request: MeasureRequest) -> str:
    return f"measuring coefficients {', '.join(f'{value:g}' for value in request.coefficients)}"


def _submit(calls: PendingCalls, branch: _Branch, steps: int, moment: str) -> PendingCall:
    """Submit the next steps of a branch: from its state or from where the part before ends, whether or not it has."""
    start = branch.start + branch.submitted
    name = f"{_named(moment)}branch {branch.segment.mixture.name!r} at steps {start} to {start + steps}"
    # A state is put when its first part is submitted: workers begin with that while others are put.
    begin = calls.executor.put(branch.state) if branch.last is None else branch.last
    call = calls.submit(replace(branch.segment, steps=steps), [begin], name=name)
    branch.last, branch.submitted = call, branch.submitted + steps
    return call


def _result_of(call: PendingCall) -> Any:
    with _explained_loss():
        return call.result()


@contextmanager
def _explained_loss() -> Iterator[None]:
    """Raise the one error of a call that was given up."""
    try:
        yield
    except CallLost as lost:
        raise ProblemError(
            f"{lost.name} ended {lost.attempts} worker processes, the last with {lost.reason}. What is in the run's "
            "folder is intact: resume it, with fewer workers."
        ) from None


@contextmanager
def open_branches(job: TrainingJob, executor: Executor) -> Iterator[BranchExecution]:
    """Yield the execution of a job's branches, with the job's number of threads each.

    An in-memory problem must pickle to reach a worker; that is checked here, before any training. Workers start while
    this process goes on, and are waited for when there is something to train.

    Args:
        job: What to train, and how.
        executor: Where; it has not been started.
    """
    with using_threads(job.threads):
        if executor.runs_here:
            binding: ModelBinding = job.training.binding(job.model)
            here = BranchWorker(job, binding)
            executor.start(lambda index: here)
            with thrifty(binding.layout.nbytes):
                yield BranchExecution(executor, here)
            return
        if job.training.loader_workers:
            check_loaders(job.problem.stream_map.values())
        sent = job if job.rebuild is None else replace(job, problem=None)  # type: ignore[arg-type]  # rebuilt there
        if job.devices:
            job.model.to("cpu")  # or every worker would make it on the first device before it moves to its own
        executor.start(MakeBranchWorker(sent))
        place_model(job.model, job.devices)
        yield BranchExecution(executor, BranchWorker(job, job.training.binding(job.model)))
