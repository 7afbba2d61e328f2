"""The one training loop of the library."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from forkmerge.compiling import backend_of, install
from forkmerge.errors import ProblemError, check_name
from forkmerge.factories import SchedulerOf
from forkmerge.formats import suits_channels_last, to_channels_last
from forkmerge.loop import Loop
from forkmerge.methods._base import LossMethod, Method
from forkmerge.order import derive, random_state_kept
from forkmerge.problem import Problem
from forkmerge.scoring import device_of
from forkmerge.state import State
from forkmerge.workbench import OptimizerFactory, SchedulerFactory, Workbench

Precision = Literal["float32", "bfloat16", "float16"]
Statistics = Literal["all", "target"]


@dataclass(frozen=True)
class Mixture:
    """The plan of a branch: its name and its task-weighting vector ν.

    Args:
        name: How records and reports call the branch.
        task_weights: `{task: weight}`; a task left out has weight 0 and costs nothing.
    """

    name: str
    task_weights: Mapping[str, float]

    def __post_init__(self) -> None:
        check_name("branch", self.name)
        object.__setattr__(self, "task_weights", dict(self.task_weights))

    def active(self, tasks: Sequence[str]) -> list[str]:
        """The tasks, out of the given ones, whose weight is not 0."""
        return [task for task in tasks if self.task_weights.get(task, 0.0) > 0]


@dataclass(frozen=True)
class Training:
    """How every branch of a run is trained.

    Args:
        optimizer: Makes the optimizer from the model.
        scheduler: Makes a scheduler from the optimizer; it runs on the global step.
        clip_norm: Largest gradient norm, over all parameters; None does not clip.
        accumulate: Micro-batches per step; the step's gradient is their mean.
        precision: "float32", or autocast to "bfloat16" or "float16" (the latter with a gradient scaler).
        channels_last: Keep convolution weights in channels-last memory format; None decides by rule.
        compile: Whether forward passes are compiled by `torch.compile`: True, or the name of a backend.
        loader_workers: Processes that read examples; the run's bits do not depend on it.
        paired: Whether branches see the same batches (True), or each its own.
        method: How the tasks of a branch are combined; None sums their weighted losses. A branch with one task
            needs none.
        gradients: Where gradient methods compare tasks: at the shared "parameters", or, approximately and cheaper,
            at the declared "representation".
        statistics: Whose batches move BatchNorm's running statistics: those of "all" streams, or only those of streams
            that serve the "target", which is measured with them; layers that the target does not pass, and branches
            without it, follow all. It makes no difference where one stream serves all tasks.
    """

    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    precision: Precision = "float32"
    channels_last: bool | None = None
    compile: bool | str = False
    loader_workers: int = 0
    paired: bool = True
    method: Method | None = None
    gradients: Literal["parameters", "representation"] = "parameters"
    statistics: Statistics = "all"

    def __post_init__(self) -> None:
        if not callable(self.optimizer):
            raise ProblemError(
                f"optimizer must be a function of the model that returns an optimizer, such as "
                f"OptimizerOf('Adam', lr=1e-3), got {self.optimizer!r}."
            )
        if self.precision not in ("float32", "bfloat16", "float16"):
            raise ProblemError(f"precision must be float32, bfloat16 or float16, got {self.precision!r}.")
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ProblemError(f"accumulate must be a positive integer, got {self.accumulate!r}.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ProblemError(f"clip_norm must be positive, got {self.clip_norm!r}.")
        if self.channels_last not in (None, True, False):
            raise ProblemError(f"channels_last must be True, False or None (by rule), got {self.channels_last!r}.")
        if self.compile:
            backend_of(self.compile)
        if not isinstance(self.loader_workers, int) or self.loader_workers < 0:
            raise ProblemError(f"loader_workers must be an integer ≥ 0, got {self.loader_workers!r}.")
        if self.gradients not in ("parameters", "representation"):
            raise ProblemError(f"gradients must be 'parameters' or 'representation', got {self.gradients!r}.")
        if self.statistics not in get_args(Statistics):
            raise ProblemError(f"statistics must be 'all' or 'target', got {self.statistics!r}.")
        if self.gradients == "representation" and self.accumulate > 1:
            raise ProblemError("gradients='representation' combines one micro-batch per step: use accumulate=1.")

    def over(self, steps: int) -> Training:
        """Return the same for a run of so many steps: a schedule may be given in shares of them."""
        return replace(self, scheduler=self.scheduler.over(steps)) if isinstance(self.scheduler, SchedulerOf) else self

    def bench(self, model: torch.nn.Module) -> Workbench:
        """Return the workbench that trains `model` this way."""
        if suits_channels_last(model, self.precision) if self.channels_last is None else self.channels_last:
            to_channels_last(model)
        if self.compile:
            install(model, self.compile)
        scaler = torch.amp.GradScaler(device_of(model).type, enabled=self.precision == "float16")
        return Workbench(model, self.optimizer, self.scheduler, scaler)

    @property
    def weighs_losses(self) -> bool:
        """Whether branches are trained by a method that sees losses only."""
        return isinstance(self.method, LossMethod)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context a forward pass runs in."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(device.type, dtype=getattr(torch, self.precision))


@dataclass
class BranchResult:
    """What a segment of training gives back.

    Args:
        state: The branch after the segment (the state passed in, changed in place).
        losses: Mean unweighted loss per task over the segment's batches that had one.
        sums: Their exact sums, to which those of other segments can be added.
        counts: How many batches had one, per task.
        seconds: Wall time.
        untouched: Trainable parameters that got no gradient in the segment's first step.
        reports: How often a task's gradient was "zero" or "not finite" under a gradient method, by task.
    """

    state: State
    losses: dict[str, float]
    sums: dict[str, list[float]]
    counts: dict[str, int]
    seconds: float
    untouched: list[str] = field(default_factory=list)
    reports: dict[str, dict[str, int]] = field(default_factory=dict)


def train_branch(
    bench: Workbench,
    problem: Problem,
    mixture: Mixture,
    state: State,
    *,
    steps: int,
    training: Training,
    seed: int,
) -> BranchResult:
    """Train one branch for `steps` steps, from the state's global step on, changing the state in place.

    θ ← θ − η Σ_k ν_k g_k(θ), with the optimizer's rule in place of plain descent (Alg. 2, line 8). The bits do not
    depend on how a stretch of steps is cut into segments, on the loader's workers or on other branches.

    Under a method that weighs losses, nothing is read back in a step. If something turns out not to be finite at the
    end, the segment is done again from a copy of its start, and every step leaves out the tasks that spoil it.

    Args:
        bench: The module and optimizer to work with.
        problem: Where batches and losses come from.
        mixture: The branch's task weights.
        state: The branch.
        steps: Steps to do.
        training: Options common to all branches.
        seed: The run's seed.
    """
    started = time.perf_counter()
    hopeful = training.weighs_losses and len(mixture.active(problem.tasks)) > 1 and mixture.name not in bench.suspects
    before = state.clone() if hopeful else None

    def train(careful: bool) -> Loop:
        return _train(bench, problem, mixture, state, range(state.step, state.step + steps), training, seed, careful)

    loop = None
    try:
        loop = train(before is None)
    except Exception:
        if before is None or state.is_finite(optimizer=True):
            raise
    if before is not None and (loop is None or not loop.is_finite or not state.is_finite(optimizer=True)):
        state.restore(before)
        bench.suspects.add(mixture.name)
        loop = train(careful=True)
    assert loop is not None
    if not loop.reports:
        bench.suspects.discard(mixture.name)
    state.step += steps
    return BranchResult(
        state,
        losses=loop.mean_losses,
        sums=loop.loss_sums,
        counts={task: len(losses) for task, losses in loop.losses.items()},
        seconds=time.perf_counter() - started,
        untouched=loop.untouched,
        reports=loop.reports,
    )


def _train(
    bench: Workbench,
    problem: Problem,
    mixture: Mixture,
    state: State,
    steps: range,
    training: Training,
    seed: int,
    careful: bool,
) -> Loop:
    order_seed = seed if training.paired else derive(seed, "branch", mixture.name)
    loop = Loop(bench, problem, mixture, training, order_seed, steps, state.method, careful=careful)
    bench.attach(state)
    bench.model.train()
    with random_state_kept():
        loop.run()
    bench.drop_gradients()
    bench.capture(state)
    return loop
