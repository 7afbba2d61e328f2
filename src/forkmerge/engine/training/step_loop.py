"""The steps of one segment: losses, their combination, the optimizer's step."""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forkmerge.engine.training.batchnorm import BatchNorm, moved_norms, untracked
from forkmerge.engine.training.combine_tasks import TaskCombiner
from forkmerge.engine.training.interrupts import is_stop_requested
from forkmerge.engine.training.learning_rates import Anneal, rates_times
from forkmerge.engine.training.method_context import Reading, StepContext
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.task_gradients import TaskLoss
from forkmerge.errors import add_fact
from forkmerge.methods.base import LossMethod, MethodState, has_hook
from forkmerge.methods.context import Setup
from forkmerge.problem.batches import Batches, batches
from forkmerge.problem.definition import Context, Problem, Stream
from forkmerge.problem.error_facts import note_origin
from forkmerge.problem.exact_sum import add_exactly, rounded
from forkmerge.problem.example_order import batch_indices, pick_task
from forkmerge.problem.randomness import derive, set_random_state
from forkmerge.problem.scoring import device_of

if TYPE_CHECKING:
    from forkmerge.engine.training.options import Mixture, Training


class StepLoop:
    """The steps of one segment of one branch.

    Args:
        binding: The module and optimizer, with the branch's state attached.
        problem: Where batches and losses come from.
        mixture: The branch's task weights and learning rate.
        training: Options common to all branches.
        seed: Of the order of examples and all randomness.
        steps: The global steps to do.
        method_state: The method's state, changed in place; empty before the first step.
        careful: Whether a loss method's steps are looked at one by one, for tasks that are not finite.
        anneal: How the learning rate falls in these steps, if it does.
    """

    def __init__(
        self,
        binding: ModelBinding,
        problem: Problem,
        mixture: Mixture,
        training: Training,
        seed: int,
        steps: range,
        method_state: MethodState,
        *,
        careful: bool = True,
        anneal: Anneal | None = None,
    ) -> None:
        self.binding, self.problem, self.mixture = binding, problem, mixture
        self.training, self.seed, self.steps, self.anneal = training, seed, steps, anneal
        self.device = device_of(binding.model)
        self.losses: dict[str, list[Tensor]] = {}
        self._loss_steps: dict[str, list[int]] = {}
        self.untouched: list[str] = []
        self.done = 0  # steps; fewer than all where it was asked to stop
        active = tuple(mixture.active(problem.tasks))
        self.method = training.method if len(active) > 1 else None
        self.streams = self._streams(active)
        self._in_turn = self._streams_in_turn(active)
        self.setup = Setup(
            active, active.index(problem.target) if problem.target in active else None, self._epoch(), self.device
        )
        self.combiner: TaskCombiner | None = None
        if self.method is not None:
            self.combiner = TaskCombiner(
                self.method, self.setup, binding, training, seed, method_state, careful=careful
            )
        self._cuts = self.method is not None and not isinstance(self.method, LossMethod)
        hooks = (getattr(module, "after_optimizer_step", None) for module in binding.model.modules())
        self._after_optimizer_step = [hook for hook in hooks if callable(hook)]
        self.last_batches: list[Reading] = []
        self._norms: list[BatchNorm] = []  # layers that the target's batches pass, where they alone move statistics

    def run(self) -> None:
        """Do the steps."""
        tasks = [self._tasks_of(step) for step in self.steps]
        if self.training.statistics == "target" and self.problem.target in self.setup.tasks:
            self._norms = self._target_norms()
        with ExitStack() as stack:  # threads that read ahead end with the segment, whatever ends it
            read = [
                self._streams_of(step, tasks_of_step) for step, tasks_of_step in zip(self.steps, tasks, strict=True)
            ]
            feeds = {
                name: stack.enter_context(closing(self._feed(name, stream, read)))
                for name, stream in self.streams.items()
            }
            for step, tasks_of_step in zip(self.steps, tasks, strict=True):
                if is_stop_requested():
                    break
                try:
                    self._step(feeds, tasks_of_step, step)
                except Exception as error:
                    add_fact(error, f"at step {step} of branch {self.mixture.name!r}")
                    raise
                self.done += 1

    def _step(self, feeds: dict[str, Batches], tasks: tuple[str, ...], step: int) -> None:
        # No optimizer moves a parameter whose gradient is None: a head that a branch leaves alone keeps its bits.
        self.binding.optimizer.zero_grad(set_to_none=True)
        factor = self.mixture.lr_scale * (1.0 if self.anneal is None else self.anneal.factor(step))
        with rates_times(self.binding.optimizer, factor):  # also for methods, which may ask for the model's rate
            if self.combiner is None:
                has_loss = self._backward_plain(feeds, tasks, step)
            else:
                has_loss = self._backward_with_method(self.combiner, feeds, tasks, step)
            if step == self.steps.start:
                self.untouched = self._without_gradient()
            self._update(has_loss)
        if self.binding.scheduler is not None:
            self.binding.scheduler.step()
        if self.combiner is not None and has_hook(self.combiner.method, "after_step"):
            with rates_times(self.binding.optimizer, factor):
                self.combiner.method.after_step(StepContext(self, step), self.combiner.own)

    @property
    def reports(self) -> dict[str, dict[str, int]]:
        """How often a task's gradient was odd, by what was odd and by task."""
        return {} if self.combiner is None else self.combiner.reports

    @property
    def is_finite(self) -> bool:
        """Whether every mean loss is a finite number."""
        return all(map(math.isfinite, self.mean_losses.values()))

    @property
    def mean_losses(self) -> dict[str, float]:
        """The mean loss of every task over the segment, once it is over."""
        return {task: rounded(parts) / len(self.losses[task]) for task, parts in self.loss_sums.items()}

    @cached_property
    def _loss_values(self) -> dict[str, list[float]]:
        """Every loss, once the segment is over: the only read-back of plain training."""
        return {task: torch.stack(losses).float().tolist() for task, losses in self.losses.items()}

    @cached_property
    def loss_sums(self) -> dict[str, list[float]]:
        """The exact sum of every task's losses, once the segment is over."""
        return {task: add_exactly([], values) for task, values in self._loss_values.items()}

    @property
    def bad_steps(self) -> dict[str, int]:
        """The first step whose loss was not finite, for every task that had one."""
        pairs = {task: zip(self._loss_steps[task], values, strict=True) for task, values in self._loss_values.items()}
        first = {task: next((s for s, value in pair if not math.isfinite(value)), None) for task, pair in pairs.items()}
        return {task: step for task, step in first.items() if step is not None}

    def losses_of(
        self, name: str, batch: Any, tasks: list[str], step: int, seed: int, *, cut: bool = False
    ) -> list[TaskLoss]:
        """Compute a stream's losses on a batch, under the random state of `seed`; cut at declared representations."""
        stream = self.problem.stream_map[name]
        set_random_state(seed)
        cuts: list[tuple[Tensor, Tensor]] | None = [] if cut else None
        with self.training.autocast(self.device):
            try:
                losses = stream.losses(self.binding.model, batch, tasks, Context(step, seed, cuts))
                _check_losses(losses, tasks)
            except Exception as error:
                self._note_origin(error, name, batch, tasks, step)
                raise
            result = []
            for task in tasks:
                loss = losses.get(task)
                if loss is None:
                    continue
                times = len(self._in_turn) if name in self._in_turn else 1
                factor = self.mixture_weight(task) * times / self.training.accumulate
                result.append(TaskLoss(task, loss, loss if factor == 1 else loss * factor, name, cuts or []))
        return result

    def _note_origin(self, error: Exception, name: str, batch: Any, tasks: list[str], step: int) -> None:
        """Say of an error of the user's losses what they were called for."""
        stream, examples = self.streams[name], None
        if self.training.accumulate == 1:  # else nobody knows here which micro-batch of the step it is
            examples = batch_indices(stream.size, stream.batch_size, step, self.seed, name).tolist()
        origin = f"the losses of stream {name!r} (tasks {', '.join(tasks)})"
        note_origin(error, origin, batch=batch, examples=examples)

    def _target_norms(self) -> list[BatchNorm]:
        """The layers that the target's batches pass: those of an auxiliary's own head follow the auxiliary."""
        if self.binding.target_norms is None:
            self.binding.target_norms = moved_norms(self.binding.model, self._pass_of_target)
        return self.binding.target_norms

    def _pass_of_target(self) -> None:
        target = self.problem.target
        for name, stream in self.problem.stream_map.items():
            if target in stream.tasks:
                with closing(batches(name, stream, [0], self.seed, self.device)) as feed:
                    self.losses_of(name, next(feed), [target], 0, derive(self.seed, name, "forward", 0))

    def mixture_weight(self, task: str) -> float:
        """ν of a task; a sampled step has weight 1."""
        if self.problem.weights == "sampling" and self.method is None:
            return 1.0
        return float(self.mixture.task_weights[task])

    def _streams(self, active: tuple[str, ...]) -> dict[str, Stream]:
        """What a step reads; where steps are shared out, a method has an equal part of a batch from every stream."""
        streams = self.problem.stream_map
        if self.problem.weights == "loss" or self.method is None:
            return streams
        count = sum(any(task in active for task in stream.tasks) for stream in streams.values())
        return {name: replace(each, batch_size=max(each.batch_size // count, 1)) for name, each in streams.items()}

    def _epoch(self) -> int:
        """Steps of one pass over the target's training data."""
        sizes = [
            stream.size / stream.batch_size for stream in self.streams.values() if self.problem.target in stream.tasks
        ]
        return max(int(np.ceil(max(sizes) / self.training.accumulate)), 1)

    def _tasks_of(self, step: int) -> tuple[str, ...]:
        """The tasks a step trains on; a method always combines all of them."""
        active = self.setup.tasks
        if self.problem.weights == "loss" or self.method is not None:
            return active
        weights = [float(self.mixture.task_weights[task]) for task in active]
        return (pick_task(active, weights, self.seed, step),)

    def _streams_in_turn(self, active: tuple[str, ...]) -> tuple[str, ...]:
        """The streams of which a step reads one, where the branch says so; a method needs all tasks in every step."""
        one = self.mixture.auxiliary_streams == "one" and self.problem.weights == "loss" and self.method is None
        serving = [name for name, stream in self.streams.items() if any(task in active for task in stream.tasks)]
        return tuple(n for n in serving if one and self.problem.target not in self.streams[n].tasks)

    def _streams_of(self, step: int, tasks: tuple[str, ...]) -> frozenset[str]:
        """What a step reads: the streams that serve its tasks and, of those in turn, the one whose turn it is."""
        serving = {name for name, stream in self.problem.stream_map.items() if any(t in tasks for t in stream.tasks)}
        if self._in_turn:
            turn = int(batch_indices(len(self._in_turn), 1, step, self.seed, "streams in turn"))
            serving -= {name for index, name in enumerate(self._in_turn) if index != turn}
        return frozenset(serving)

    def _feed(self, name: str, stream: Stream, read: list[frozenset[str]]) -> Batches:
        accumulate = self.training.accumulate
        positions = [
            step * accumulate + micro
            for step, names in zip(self.steps, read, strict=True)
            if name in names
            for micro in range(accumulate)
        ]
        workers = self.training.loader_workers if positions else 0
        return batches(name, stream, positions, self.seed, self.device, workers=workers)

    def _read(self, feeds: dict[str, Batches], tasks: tuple[str, ...], step: int, micro: int) -> list[Reading]:
        """Read one micro-batch of every stream that the step reads."""
        position = step * self.training.accumulate + micro
        names = self._streams_of(step, tasks)
        return [
            (name, next(feeds[name]), derive(self.seed, name, "forward", position))
            for name in self.problem.stream_map
            if name in names
        ]

    def _forward(self, readings: list[Reading], tasks: tuple[str, ...], step: int) -> list[TaskLoss]:
        """The losses of one micro-batch over all streams; remembers them for the means."""
        result: list[TaskLoss] = []
        for name, batch, seed in readings:
            served = self.problem.stream_map[name].tasks
            trained = [task for task in served if task in tasks]
            with untracked(() if self.problem.target in served else self._norms):
                result += self.losses_of(name, batch, trained, step, seed, cut=self._cuts)
        totals: dict[str, Tensor] = {}
        for item in result:
            raw = item.raw.detach()
            totals[item.task] = totals[item.task] + raw if item.task in totals else raw
        for task, total in totals.items():
            self.losses.setdefault(task, []).append(total)
            self._loss_steps.setdefault(task, []).append(step)
        return result

    def _backward_plain(self, feeds: dict[str, Batches], tasks: tuple[str, ...], step: int) -> bool:
        """Differentiate the sum of the weighted losses; False if there was no label for any task."""
        has_loss = False
        for micro in range(self.training.accumulate):
            losses = self._forward(self._read(feeds, tasks, step, micro), tasks, step)
            if losses:
                # One pass for all streams, as in a plain loop: one per stream would hold fewer activations, and took a
                # fifth of the step of a small MLP.
                total = losses[0].scaled
                for item in losses[1:]:
                    total = total + item.scaled
                self.binding.scaler.scale(total).backward()
                has_loss = True
        return has_loss

    def _backward_with_method(
        self, combiner: TaskCombiner, feeds: dict[str, Batches], tasks: tuple[str, ...], step: int
    ) -> bool:
        """Let the method combine the tasks; False if there was no label for any of them."""
        readings = [self._read(feeds, tasks, step, micro) for micro in range(self.training.accumulate)]
        self.last_batches = [reading for part in readings for reading in part]
        context = StepContext(self, step)
        if has_hook(combiner.method, "before_step"):
            combiner.method.before_step(context, combiner.own)
        micros = [self._forward(part, tasks, step) for part in readings]
        if not any(micros):
            return False
        combiner.backward(micros, step, context)
        return any(p.grad is not None for p in self.binding.layout.parameters)

    def _update(self, has_loss: bool) -> None:
        optimizer, scaler = self.binding.optimizer, self.binding.scaler
        if has_loss and self.training.clip_norm is not None:
            scaler.unscale_(optimizer)  # it scaled the weighted losses; clipping sees the gradients of these
            torch.nn.utils.clip_grad_norm_(self.binding.layout.parameters, self.training.clip_norm)
        if has_loss or not scaler.is_enabled():  # an enabled scaler refuses a step without gradients
            scaler.step(optimizer)
            scaler.update()
        for hook in self._after_optimizer_step:
            hook()

    def _without_gradient(self) -> list[str]:
        pairs = zip(self.binding.layout.slices, self.binding.layout.parameters, strict=True)
        return [row_slice.name for row_slice, parameter in pairs if parameter.grad is None]


def _check_losses(losses: Any, tasks: list[str]) -> None:
    """Refuse what the first batch was refused for, in any later one."""
    if not hasattr(losses, "get"):
        raise TypeError(f"losses must return {{task: loss}}, got {type(losses).__name__}")
    for task in tasks:
        loss = losses.get(task)
        if loss is not None and (not isinstance(loss, Tensor) or loss.dim()):
            form = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"the loss of task {task!r} must be a scalar tensor, got {form}")
