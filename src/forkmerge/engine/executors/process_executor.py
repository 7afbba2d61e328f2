"""Branches in worker processes: the same bits as one after the other in this one, in less time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from forkmerge.engine.executors.load_balance import Part, divide
from forkmerge.engine.executors.serial import Segment, SerialExecutor, TrainingJob
from forkmerge.engine.executors.shared_memory import Memory
from forkmerge.engine.executors.shared_rows import (
    Address,
    SharedRows,
    Slot,
    WorkerRows,
    address_of,
    from_wire,
    rest_to_wire,
    rows_of,
    with_rows,
)
from forkmerge.engine.executors.worker_team import ATTEMPTS, Event, Handler, Team, Tell, Worker, WorkerError
from forkmerge.engine.merging.measure_candidate import Measurement, MeasureRequest
from forkmerge.engine.training.branch import BranchResult
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError
from forkmerge.problem.exact_sum import add_exactly, rounded

_TRIAL = 16  # the first 1/16 of the first round shows what a step of every branch takes


@dataclass(frozen=True)
class _Order:
    """What a worker is told to train.

    Args:
        segment: The steps.
        rest: All of the branch's state but its rows.
        start: The rows to start from.
        spare: The rows to train in.
        gone: Memory it need not keep.
    """

    segment: Segment
    rest: tuple[Any, bytes]
    start: Address
    spare: Address
    gone: list[str]


@dataclass(frozen=True)
class _Request:
    """What a worker is told to measure.

    Args:
        question: What.
        states: The states that it is about, without and with their rows.
        spare: The rows to build a combination in.
        gone: Memory it need not keep.
    """

    question: MeasureRequest
    states: list[tuple[tuple[Any, bytes], Address]]
    spare: Address
    gone: list[str]


@dataclass(frozen=True)
class _Answer:
    """What it gives back: the result without its state, and the state."""

    result: dict[str, Any]
    rest: tuple[Any, bytes]
    rows: Address


@dataclass
class _Task:
    """A part in a worker's hands."""

    part: Part
    spare: Slot
    attempts: int = 1


@dataclass
class _Branch:
    """A branch while its segment is trained."""

    segment: Segment
    state: State
    left: int
    results: list[BranchResult] = field(default_factory=list)
    is_busy: bool = False


class ProcessExecutor(SerialExecutor):
    """Trains branches in worker processes.

    Args:
        job: What every worker needs to know once.
        binding: This process's own, for merges.
        workers: How many processes.
        team: The processes.
    """

    def __init__(self, job: TrainingJob, binding: ModelBinding, workers: int, team: Team) -> None:
        super().__init__(job, binding)
        self.workers, self.team, self.shelf = workers, team, SharedRows(workers)
        # By phase and branch; over all its steps, because single segments are noisy on a busy machine.
        self._spent: dict[tuple[str, str], tuple[float, int]] = {}  # seconds, steps

    def train(self, segments: Sequence[Segment], states: Sequence[State]) -> Iterator[BranchResult]:
        """Train every branch for its segment; results come in the order of the branches."""
        branches = [_Branch(g, s, g.steps) for g, s in zip(segments, states, strict=True)]
        next_out = 0
        self.team.abandon()
        for waiting in self._plans(branches):
            redo: list[_Task] = []
            while waiting or redo or any(branch.is_busy for branch in branches):
                self._hand_out(branches, waiting, redo)
                for event in self.team.events():
                    self._take_in(event, branches, redo)
                while next_out < len(branches) and not branches[next_out].left:
                    yield _joined(branches[next_out])
                    next_out += 1

    def _plans(self, branches: list[_Branch]) -> Iterator[list[Part]]:
        """Yield what to train; first of all a little, where that must show how long a step of every branch takes."""
        unknown = any(_name(branch) not in self._spent for branch in branches)
        shortest = min((branch.left for branch in branches), default=0)
        if unknown and len(branches) > self.workers and shortest >= _TRIAL and not self.job.training.loader_workers:
            yield [Part(index, branch.left // _TRIAL, 0.0) for index, branch in enumerate(branches)]
        pace = {name: seconds / steps for name, (seconds, steps) in self._spent.items()}
        usual = max(pace.values(), default=1.0)
        costs = [pace.get(_name(branch), usual) for branch in branches]
        yield divide([branch.left for branch in branches], costs, self.workers)

    def measure(self, states: Sequence[State], questions: Sequence[MeasureRequest]) -> list[Measurement]:
        """Answer questions about combinations of states, in their order."""
        slots = [_weights_of(self.shelf.place(state)) for state in states]
        sent = [(rest_to_wire(State(s.step, {}, s.buffers)), address_of(a)) for s, a in zip(states, slots, strict=True)]
        waiting = [_Task(Part(index, 0, 0.0), {}) for index in range(len(questions))]
        found: dict[int, Measurement] = {}
        self.team.abandon()
        while len(found) < len(questions):
            for worker in self.team.free()[: len(waiting)]:
                task = waiting.pop(0)
                task.spare = task.spare or self.shelf.spare(slots[0])
                request = _Request(questions[task.part.branch], sent, address_of(task.spare), self._gone(worker))
                self._begin(worker, task, request, [*slots, task.spare])
            for event in self.team.events():
                task = event.job
                if event.kind == "died":
                    waiting.insert(0, _again(event, "measuring a merge"))
                    continue
                found[task.part.branch] = _done(event)
                self.shelf.give_back(task.spare)
        return [found[index] for index in range(len(questions))]

    def _gone(self, worker: Worker) -> list[str]:
        return [key for key in worker.knows if key not in self.shelf.alive]

    def _hand_out(self, branches: list[_Branch], waiting: list[Part], redo: list[_Task]) -> None:
        for worker in self.team.free():
            if redo:
                task = redo.pop(0)
            else:
                part = next((part for part in waiting if not branches[part.branch].is_busy), None)
                if part is None:
                    return
                waiting.remove(part)
                task = _Task(part, {})
            branch = branches[task.part.branch]
            branch.is_busy = True
            start = self.shelf.place(branch.state)
            task.spare = task.spare or self.shelf.spare(start)
            order = _Order(
                replace(branch.segment, steps=task.part.steps),
                rest_to_wire(branch.state),
                address_of(start),
                address_of(task.spare),
                self._gone(worker),
            )
            self._begin(worker, task, order, [start, task.spare])

    def _begin(self, worker: Worker, task: Any, order: Any, slots: list[Slot]) -> None:
        memories = self.shelf.unknown(worker.knows, slots)
        worker.knows = {key for key in worker.knows if key in self.shelf.alive} | {m.key for m in memories}
        worker.begin(task, order, memories)

    def _take_in(self, event: Event, branches: list[_Branch], redo: list[_Task]) -> None:
        task: _Task = event.job
        branch = branches[task.part.branch]
        if event.kind == "died":
            start, name = branch.state.step, branch.segment.mixture.name
            redo.append(_again(event, f"branch {name!r} at steps {start} to {start + task.part.steps}"))
            return
        answer: _Answer = _done(event)
        self.shelf.adopt(event.memories)
        event.worker.knows |= {memory.key for memory in event.memories}
        _take_rest(branch.state, from_wire(answer.rest))
        self.shelf.install(branch.state, self.shelf.find(answer.rows))
        self.binding.place(branch.state)
        result = BranchResult(branch.state, **answer.result)
        seconds, steps = self._spent.get(_name(branch), (0.0, 0))
        self._spent[_name(branch)] = (seconds + result.seconds, steps + task.part.steps)
        branch.results.append(result)
        branch.left -= task.part.steps
        branch.is_busy = False


def _again(event: Event, what: str) -> _Task:
    """Return the task of a worker that died, to be done again, unless it has ended too many."""
    task: _Task = event.job
    if task.attempts == ATTEMPTS:
        raise ProblemError(
            f"{what} ended {ATTEMPTS} worker processes, the last with {event.value}. What is in the run's folder is "
            "intact: resume it, with fewer workers."
        )
    return replace(task, attempts=task.attempts + 1)


def _done(event: Event) -> Any:
    if event.kind == "failed":
        raise WorkerError(event.value)
    return event.value


def _weights_of(slot: Slot) -> Slot:
    """Return the rows that a model computes with."""
    return {key: row for key, row in slot.items() if key[0] == "rows"}


def _name(branch: _Branch) -> tuple[str, str]:
    return branch.segment.phase, branch.segment.mixture.name


def _take_rest(state: State, other: State) -> None:
    """Overwrite all of a state but its rows."""
    for item in fields(State):
        if item.name not in ("rows", "optimizer_rows"):
            setattr(state, item.name, getattr(other, item.name))


def _joined(branch: _Branch) -> BranchResult:
    """Return the result of a segment from those of its parts: the same as if it had not been cut."""
    first, *others = branch.results
    sums, counts = dict(first.sums), dict(first.counts)
    reports = {what: dict(found) for what, found in first.reports.items()}
    for result in others:
        for task, part in result.sums.items():
            sums[task] = add_exactly(sums.get(task, []), part)
            counts[task] = counts.get(task, 0) + result.counts[task]
        for what, found in result.reports.items():
            for task, count in found.items():
                known = reports.setdefault(what, {})
                known[task] = known.get(task, 0) + count
    return replace(
        first,
        losses={task: rounded(part) / counts[task] for task, part in sums.items()},
        sums=sums,
        counts=counts,
        seconds=sum(result.seconds for result in branch.results),
        reports=reports,
    )


@dataclass(frozen=True)
class Enlist:
    """Makes the handler of a worker process: the worker's own binding, problem and device."""

    job: TrainingJob

    def __call__(self, index: int) -> Handler:
        """Return what does this worker's jobs."""
        job = self.job
        if job.rebuild is not None:
            job.problem = job.rebuild()
        torch.set_num_threads(job.threads)
        if job.devices:
            device = job.devices[index % len(job.devices)]
            if device.type == "cuda":
                torch.cuda.set_device(device)
            job.model.to(device)
        return _Hand(SerialExecutor(job, job.training.binding(job.model)))


class _Hand:
    """One worker process at its work."""

    def __init__(self, executor: SerialExecutor) -> None:
        self.executor, self.desk = executor, WorkerRows()

    def __call__(self, order: _Order | _Request, memories: list[Memory], tell: Tell) -> tuple[Any, list[Memory]]:
        """Do what is ordered."""
        self.desk.note(memories, order.gone)
        return self._train(order) if isinstance(order, _Order) else (self._measure(order), [])

    def _measure(self, request: _Request) -> Measurement:
        """Answer a question; combinations are built in the spare rows."""
        place, find = self.executor.binding.place, self.desk.find
        states = [place(with_rows(from_wire(rest), find(address))) for rest, address in request.states]
        out = place(with_rows(State(0, {}), find(request.spare)))
        return self.executor.measure_here(states, request.question, out)

    def _train(self, order: _Order) -> tuple[_Answer, list[Memory]]:
        """Train a segment in the spare rows."""
        rows = self.desk.find(order.spare)
        for key, row in self.desk.find(order.start).items():
            rows[key].copy_(row)
        state = self.executor.binding.place(with_rows(from_wire(order.rest), rows))
        result = self.executor.train_here(order.segment, state)
        address, made = self.desk.publish(rows_of(result.state), order.spare)
        plain = {item.name: getattr(result, item.name) for item in fields(BranchResult) if item.name != "state"}
        return _Answer(plain, rest_to_wire(result.state), address), made
