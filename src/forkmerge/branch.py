"""The one training loop of the library."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from forkmerge.errors import ProblemError, check_name
from forkmerge.feed import batches, move
from forkmerge.order import derive, pick_task, random_state_kept, set_random_state
from forkmerge.problem import Context, Problem, Stream
from forkmerge.scoring import device_of
from forkmerge.state import State
from forkmerge.workbench import OptimizerFactory, SchedulerFactory, Workbench

Precision = Literal["float32", "bfloat16", "float16"]


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
        channels_last: Keep convolution weights in channels-last memory format.
        loader_workers: Processes that read examples; the run's bits do not depend on it.
        paired: Whether branches see the same batches (True), or each its own.
    """

    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    precision: Precision = "float32"
    channels_last: bool = False
    loader_workers: int = 0
    paired: bool = True

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
        if not isinstance(self.loader_workers, int) or self.loader_workers < 0:
            raise ProblemError(f"loader_workers must be an integer ≥ 0, got {self.loader_workers!r}.")

    def bench(self, model: torch.nn.Module) -> Workbench:
        """Return the workbench that trains `model` this way."""
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        scaler = torch.amp.GradScaler(device_of(model).type, enabled=self.precision == "float16")
        return Workbench(model, self.optimizer, self.scheduler, scaler)

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
        seconds: Wall time.
        untouched: Trainable parameters that got no gradient in the segment's first step.
    """

    state: State
    losses: dict[str, float]
    seconds: float
    untouched: list[str] = field(default_factory=list)


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
    order_seed = seed if training.paired else derive(seed, "branch", mixture.name)
    loop = _Loop(bench, problem, mixture, training, order_seed, range(state.step, state.step + steps))
    bench.attach(state)
    bench.model.train()
    with random_state_kept():
        loop.run()
    bench.drop_gradients()
    bench.capture(state)
    state.step += steps
    return BranchResult(state, loop.mean_losses(), time.perf_counter() - started, loop.untouched)


class _Loop:
    """The steps of one segment."""

    def __init__(
        self, bench: Workbench, problem: Problem, mixture: Mixture, training: Training, seed: int, steps: range
    ) -> None:
        self.bench, self.problem, self.mixture = bench, problem, mixture
        self.training, self.seed, self.steps = training, seed, steps
        self.device = device_of(bench.model)
        self.losses: dict[str, list[Tensor]] = {}
        self.untouched: list[str] = []

    def run(self) -> None:
        plan = [self._tasks_of(step) for step in self.steps]
        feeds = {name: self._feed(name, stream, plan) for name, stream in self.problem.stream_map.items()}
        for step, weights in zip(self.steps, plan, strict=True):
            self.bench.optimizer.zero_grad(set_to_none=True)
            has_loss = False
            for micro in range(self.training.accumulate):
                has_loss |= self._backward(feeds, weights, step, step * self.training.accumulate + micro)
            if step == self.steps.start:
                self.untouched = self._without_gradient()
            self._update(has_loss)

    def _tasks_of(self, step: int) -> dict[str, float]:
        """The tasks a step trains on, and the weight of each loss."""
        active = self.mixture.active(self.problem.tasks)
        weights = {task: float(self.mixture.task_weights[task]) for task in active}
        if self.problem.weights == "loss":
            return weights
        return {pick_task(active, list(weights.values()), self.seed, step): 1.0}

    def _feed(self, name: str, stream: Stream, plan: list[dict[str, float]]) -> Iterator[Any]:
        accumulate = self.training.accumulate
        positions = [
            step * accumulate + micro
            for step, weights in zip(self.steps, plan, strict=True)
            if any(task in weights for task in stream.tasks)
            for micro in range(accumulate)
        ]
        return batches(name, stream, positions, self.seed, self.training.loader_workers if positions else 0)

    def _backward(self, feeds: dict[str, Iterator[Any]], weights: dict[str, float], step: int, position: int) -> bool:
        """Add the gradient of one micro-batch's weighted losses; False if it had no label for any task."""
        total: Tensor | None = None
        for name, stream in self.problem.stream_map.items():
            tasks = [task for task in stream.tasks if task in weights]
            if not tasks:
                continue
            batch = move(next(feeds[name]), self.device)
            call_seed = derive(self.seed, name, "forward", position)
            set_random_state(call_seed)
            with self.training.autocast(self.device):
                losses = stream.losses(self.bench.model, batch, tasks, Context(step, call_seed))
                for task in tasks:
                    loss = losses.get(task)
                    if loss is None:
                        continue
                    # Stays on the device: the only read-back of a segment is in mean_losses.
                    self.losses.setdefault(task, []).append(loss.detach())
                    factor = weights[task] / self.training.accumulate
                    weighted = loss if factor == 1 else loss * factor
                    total = weighted if total is None else total + weighted
        if total is None:
            return False
        self.bench.scaler.scale(total).backward()
        return True

    def _update(self, has_loss: bool) -> None:
        optimizer, scaler = self.bench.optimizer, self.bench.scaler
        if has_loss and self.training.clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.bench.layout.parameters, self.training.clip_norm)
        if has_loss or not scaler.is_enabled():  # an enabled scaler refuses a step without gradients
            scaler.step(optimizer)
            scaler.update()
        if self.bench.scheduler is not None:
            self.bench.scheduler.step()

    def _without_gradient(self) -> list[str]:
        pairs = zip(self.bench.layout.places, self.bench.layout.parameters, strict=True)
        return [place.name for place, parameter in pairs if parameter.grad is None]

    def mean_losses(self) -> dict[str, float]:
        return {task: torch.stack(losses).float().mean().item() for task, losses in self.losses.items()}
