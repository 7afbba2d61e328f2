"""Extra passes a method may ask for around a step: other batches, other weights, never a trace left behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from forkmerge.engine.training.batchnorm import statistics_frozen
from forkmerge.engine.training.task_gradients import TaskGradients, TaskLoss, task_gradient
from forkmerge.errors import ProblemError
from forkmerge.methods.base import precise
from forkmerge.methods.context import Array, Direction, MethodContext, Which
from forkmerge.problem.batches import batches
from forkmerge.problem.randomness import derive

if TYPE_CHECKING:
    from forkmerge.engine.training.step_loop import StepLoop

Reading = tuple[str, Any, int]
"""A stream's name, a batch of it, and the seed of its forward pass."""


class StepContext(MethodContext):
    """The context of a step of a training loop; `MethodContext` says what it offers.

    Args:
        loop: The loop.
        step: The global step.
    """

    def __init__(self, loop: StepLoop, step: int) -> None:
        self._loop, self.step, self.setup = loop, step, loop.setup
        self._beside: tuple[TaskGradients, list[int], float] | None = None

    def beside(self, gradients: TaskGradients, rows: list[int], scale: float) -> StepContext:
        """Remember the gradients of the step's tasks, of which the method sees the given rows."""
        self._beside = (gradients, rows, scale)
        return self

    @property
    def lr(self) -> float:
        """The model's current learning rate."""
        return float(self._loop.binding.lr)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters."""
        return self._loop.binding.layout.parameters

    def losses(self, which: Which = "this") -> Tensor:
        """Return the weighted losses of all tasks at the current weights; NaN stands for a task without a label."""
        with torch.no_grad():
            sums = self._sums(self._compute(which, self.setup.tasks))
        missing = torch.full((), torch.nan, device=self.setup.device)
        return torch.stack([sums.get(task, missing) for task in self.setup.tasks]).to(precise(self.setup.device))

    def gradient(self, weights: Mapping[int, float | Tensor], which: Which = "this") -> list[Tensor | None]:
        """Return ∇ Σ w_i L_i for every trainable parameter, at the current weights."""
        sums = self._sums(self._compute(which, [self.setup.tasks[i] for i in weights]))
        parts = [sums[self.setup.tasks[i]] * weight for i, weight in weights.items() if self.setup.tasks[i] in sums]
        if not parts:
            return [None] * len(self.parameters)
        scaler = self._loop.binding.scaler
        gradient = task_gradient(scaler.scale(torch.stack(parts).sum()), [], self.parameters, keep=False)
        if not scaler.is_enabled():
            return gradient
        return [None if g is None else g / scaler.get_scale() for g in gradient]

    def gramian(self, which: Which = "this") -> tuple[list[int], Array]:
        """Return the tasks that have a label and the Gramian of their gradients on shared parameters."""
        losses = self._compute(which, self.setup.tasks, cut=True)
        present = [i for i, task in enumerate(self.setup.tasks) if any(item.task == task for item in losses)]
        combiner = self._loop.combiner
        assert combiner is not None
        gradients = TaskGradients(self.parameters, [self.setup.tasks[i] for i in present], combiner.layouts)
        gradients.add(sorted(losses, key=lambda item: self.setup.tasks.index(item.task)))
        gradients.build()
        return present, gradients.gramian().cpu().double().numpy()

    def products(self, direction: Direction) -> Array | None:
        """Return ⟨g_k, v⟩ over the shared parameters, for the gradients of the K tasks that the method sees, [K]."""
        assert self._beside is not None, "a method sees gradients inside `weights` or `direction` only"
        gradients, rows, scale = self._beside
        products = gradients.products(direction)
        if products is None:
            return None
        result: Array = products.cpu().double().numpy()[rows] / scale
        return result

    def cross_gramian(self, present: Sequence[int], which: Which = "second") -> Array:
        """Return ⟨g_i, h_j⟩ for the gradients of this step and those of another batch, [K, K]; not symmetric."""
        sums, columns = self._sums(self._compute(which, [self.setup.tasks[i] for i in present])), []
        for i in present:
            task = self.setup.tasks[i]
            column = self.products(task_gradient(sums[task], [], self.parameters, keep=True)) if task in sums else None
            columns.append(np.zeros(len(present)) if column is None else column)
        return np.nan_to_num(np.stack(columns, axis=1), posinf=0.0, neginf=0.0)

    def descent(self, gradient: Direction) -> list[Tensor | None]:
        """Return m + g + wd·θ: what the optimizer's momentum and weight decay make of a gradient, without its rate."""
        result: list[Tensor | None] = []
        for parameter, g, group in zip(self.parameters, gradient, self._groups(), strict=True):
            if g is None:
                result.append(None)
                continue
            momentum, decay = float(group.get("momentum", 0.0)), float(group.get("weight_decay", 0.0))
            total = g + decay * parameter.detach() if decay else g
            buffer = self._loop.binding.optimizer.state.get(parameter, {}).get("momentum_buffer")
            result.append(total + momentum * buffer if momentum and buffer is not None else total)
        return result

    def at_own_rates(self, direction: Direction) -> list[Tensor | None]:
        """Scale every part by its parameter group's learning rate over `lr`: 1 where there is one group."""
        rates = [float(group["lr"]) / self.lr if self.lr else 1.0 for group in self._groups()]
        return [part if part is None or rate == 1 else part * rate for part, rate in zip(direction, rates, strict=True)]

    def _groups(self) -> list[dict[str, Any]]:
        """The parameter group of every parameter; one that the optimizer leaves alone has a rate of zero."""
        groups = {id(p): group for group in self._loop.binding.optimizer.param_groups for p in group["params"]}
        return [groups.get(id(parameter), {"lr": 0.0}) for parameter in self.parameters]

    @contextmanager
    def moved(self, direction: Direction, scale: float | Tensor) -> Iterator[None]:
        """Work at θ + scale·direction; the weights come back bit for bit."""
        # Through .data, as a graph of the step may be waiting for its backward pass with these very weights.
        pairs = [(p.data, d) for p, d in zip(self.parameters, direction, strict=True) if d is not None]
        saved = [value.clone() for value, _ in pairs]
        for value, d in pairs:
            value.add_(d * scale)
        try:
            yield
        finally:
            for (value, _), before in zip(pairs, saved, strict=True):
                value.copy_(before)

    def add_noise(self, deviation: float) -> None:
        """Add Gaussian noise to all trainable parameters, for good."""
        generator = torch.Generator().manual_seed(derive(self._loop.seed, "noise", self.step))
        for parameter in self.parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.add_(noise.to(parameter.device), alpha=deviation)

    def _sums(self, items: list[TaskLoss]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for item in items:
            sums[item.task] = sums[item.task] + item.scaled if item.task in sums else item.scaled
        return sums

    def _compute(self, which: Which, tasks: Sequence[str], *, cut: bool = False) -> list[TaskLoss]:
        loop, result = self._loop, []
        with statistics_frozen(loop.binding.model):
            for name, batch, seed in self._readings(which):
                served = [task for task in loop.problem.stream_map[name].tasks if task in tasks]
                if which == "validation":
                    served = [task for task in served if task == loop.problem.target]
                if served:
                    result += self._losses_of(which, name, batch, served, seed, cut)
        return result

    def _losses_of(self, which: Which, name: str, batch: Any, tasks: list[str], seed: int, cut: bool) -> list[TaskLoss]:
        try:
            return self._loop.losses_of(name, batch, tasks, self.step, seed, cut=cut)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            if which != "validation":
                raise
            raise ProblemError(
                f"the method looks at validation examples, but the stream of {tasks[0]!r} cannot read them "
                f"({error}). Give Evaluation(as_training=…), the same examples in the stream's own form, or let the "
                "method look at a second training batch."
            ) from error

    def _readings(self, which: Which) -> list[Reading]:
        """The batches to look at; others than the step's own are those of an endless stream shuffled anew."""
        loop = self._loop
        if which == "this":
            return loop.last_batches
        seed, readings = derive(loop.seed, which), []
        accumulate = loop.training.accumulate
        positions = range(self.step * accumulate, (self.step + 1) * accumulate)
        for name, stream in loop.streams.items():
            if which == "validation":
                if loop.problem.target not in stream.tasks:
                    continue
                evaluation = loop.problem.target_validation
                extra = evaluation.dataset if evaluation.as_training is None else evaluation.as_training
                stream = replace(stream, dataset=extra)
            elif not any(task in self.setup.tasks for task in stream.tasks):
                continue
            for position, batch in zip(positions, batches(name, stream, positions, seed, loop.device), strict=True):
                readings.append((name, batch, derive(seed, name, "forward", position)))
        return readings
