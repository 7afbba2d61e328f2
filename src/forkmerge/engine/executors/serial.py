"""Where branches run: in this process, one after the other, or in worker processes, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from forkmerge.engine.executors.devices import place_model
from forkmerge.engine.executors.worker_team import Team, Worker
from forkmerge.engine.merging.measure_candidate import Measurement, MeasureRequest, measure_candidate
from forkmerge.engine.training.branch import BranchResult, train_branch
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.options import Mixture, Training
from forkmerge.engine.training.release_memory import thrifty
from forkmerge.engine.training.state import State
from forkmerge.problem.definition import Problem


@dataclass
class TrainingJob:
    """What every worker needs to know once.

    Args:
        problem: The sealed problem.
        model: The module as it is before training.
        training: Options common to all branches.
        seed: The run's seed.
        threads: Threads per branch.
        rebuild: Makes the problem anew in a worker, where pickling it would be slow or impossible.
        devices: Where workers train, in turn; none leaves the model where it is.
    """

    problem: Problem
    model: nn.Module
    training: Training
    seed: int
    threads: int
    rebuild: Callable[[], Problem] | None = None
    devices: tuple[torch.device, ...] = ()

    def problem_for(self, phase: str) -> Problem:
        """The problem of a phase: a refit trains on the validation labels, too."""
        return self.problem.with_validation_labels() if phase == "refit" else self.problem


@dataclass(frozen=True)
class Segment:
    """A stretch of training of one branch: a pure function of these fields."""

    phase: str
    mixture: Mixture
    steps: int


class SerialExecutor:
    """Trains the branches of a job, here, one after the other: the reference for all other executors.

    Args:
        job: What to train, and how.
        binding: The module and optimizer to work with.
    """

    workers = 1

    def __init__(self, job: TrainingJob, binding: ModelBinding) -> None:
        self.job, self.binding = job, binding
        self._problems: dict[str, Problem] = {}

    def problem(self, phase: str) -> Problem:
        """The problem of a phase, built once."""
        if phase not in self._problems:
            self._problems[phase] = self.job.problem_for(phase)
        return self._problems[phase]

    def train(self, segments: Sequence[Segment], states: Sequence[State]) -> Iterator[BranchResult]:
        """Train every branch for its segment; results come in the order of the branches."""
        for segment, state in zip(segments, states, strict=True):
            yield self.train_here(segment, state)

    def measure(self, states: Sequence[State], questions: Sequence[MeasureRequest]) -> list[Measurement]:
        """Answer questions about combinations of states; workers share them, so ask for several at once."""
        out = states[0].weights()
        return [self.measure_here(states, question, out) for question in questions]

    def measure_here(self, states: Sequence[State], question: MeasureRequest, out: State) -> Measurement:
        """Answer one question in this process; the combination is built in `out`."""
        problem, job = self.problem(question.phase), self.job
        return measure_candidate(self.binding, problem, states, question, out, training=job.training, seed=job.seed)

    def train_here(self, segment: Segment, state: State) -> BranchResult:
        """Train one branch in this process."""
        return train_branch(
            self.binding,
            self.problem(segment.phase),
            segment.mixture,
            state,
            steps=segment.steps,
            training=self.job.training,
            seed=self.job.seed,
        )


@contextmanager
def open_executor(job: TrainingJob, workers: int, recruits: Sequence[Worker] = ()) -> Iterator[SerialExecutor]:
    """Yield a executor of one (serial) or several worker processes, with the job's number of threads each.

    An in-memory problem must pickle to reach a worker; that is checked here, before any training. The processes
    start while this one goes on, or are given as recruits, and are waited for when there is something to train.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        if workers == 1:
            binding = job.training.binding(job.model)
            with thrifty(binding.layout.nbytes):
                yield SerialExecutor(job, binding)
            return
        from forkmerge.engine.executors.process_executor import Enlist, ProcessExecutor

        sent = job if job.rebuild is None else replace(job, problem=None)  # type: ignore[arg-type]  # rebuilt there
        if job.devices:
            job.model.to("cpu")  # or every worker would make it on the first device before it moves to its own
        team = Team(Enlist(sent), workers, recruits)
        place_model(job.model, job.devices)
        try:
            yield ProcessExecutor(job, job.training.binding(job.model), workers, team)
        finally:
            team.close()  # also in the middle of a segment: checkpoints are on disk
    finally:
        torch.set_num_threads(before)
