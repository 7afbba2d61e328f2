"""What a worker does for a run: it trains segments of branches, and measures combinations of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import nn

from forkmerge.engine.executors.executor import Answer, Inputs, Tell
from forkmerge.engine.merging.measure_candidate import Measurement, MeasureRequest, measure_candidate
from forkmerge.engine.training.branch import BranchResult, train_branch
from forkmerge.engine.training.interrupts import hear_interrupts
from forkmerge.engine.training.learning_rates import Anneal
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.options import Mixture, Training
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
    """A stretch of training of one branch: a pure function of these fields and the branch's state."""

    phase: str
    mixture: Mixture
    steps: int
    anneal: Anneal | None = None


class BranchWorker:
    """Does the calls of a training job, in whatever process.

    Args:
        job: What to train, and how.
        binding: The module and optimizer to work with.
    """

    def __init__(self, job: TrainingJob, binding: ModelBinding) -> None:
        self.job, self.binding = job, binding
        self._problems: dict[str, Problem] = {}

    def problem(self, phase: str) -> Problem:
        """The problem of a phase, built once."""
        if phase not in self._problems:
            self._problems[phase] = self.job.problem_for(phase)
        return self._problems[phase]

    def __call__(self, payload: Segment | MeasureRequest, inputs: Inputs, tell: Tell) -> Answer:
        """Train the branch, or measure a combination of the branches, that a call is about."""
        return self._train(payload, inputs) if isinstance(payload, Segment) else Answer(self._measure(payload, inputs))

    def _train(self, segment: Segment, inputs: Inputs) -> Answer:
        """Train a segment; the data are the result's fields, all but its state."""
        result = train_branch(
            self.binding,
            self.problem(segment.phase),
            segment.mixture,
            self.binding.place(inputs.take()),
            steps=segment.steps,
            training=self.job.training,
            seed=self.job.seed,
            anneal=segment.anneal,
        )
        data = {item.name: getattr(result, item.name) for item in fields(BranchResult) if item.name != "state"}
        return Answer(data, result.state)

    def _measure(self, request: MeasureRequest, inputs: Inputs) -> Measurement:
        """Measure a combination of the states, which is built in scratch memory."""
        binding, problem, job = self.binding, self.problem(request.phase), self.job
        states, out = [binding.place(state) for state in inputs.read()], binding.place(inputs.scratch())
        return measure_candidate(binding, problem, states, request, out, training=job.training, seed=job.seed)


@dataclass(frozen=True)
class MakeBranchWorker:
    """Makes the worker of another process, with a problem, device and binding of its own."""

    job: TrainingJob

    def __call__(self, index: int) -> BranchWorker:
        """Return what does the calls of worker `index`."""
        job = self.job
        if job.rebuild is not None:
            job.problem = job.rebuild()
        torch.set_num_threads(job.threads)
        hear_interrupts()
        if job.devices:
            device = job.devices[index % len(job.devices)]
            if device.type == "cuda":
                torch.cuda.set_device(device)
            job.model.to(device)
        return BranchWorker(job, job.training.binding(job.model))
