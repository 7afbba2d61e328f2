"""Extra passes a method may ask for around a step: other batches, other weights, never a trace left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from forkmerge.feed import batches, move
from forkmerge.gradients import TaskLoss
from forkmerge.order import derive

if TYPE_CHECKING:
    from forkmerge.loop import Loop

Which = Literal["this", "second", "validation"]
Direction = Sequence["Tensor | None"]


class Probe:
    """What a method's `before_step` and `after_step` may look at.

    Extra forward passes run in training mode with the step's own randomness, but move no BatchNorm statistics.

    Attributes:
        step: The global step.
        lr: The model's current learning rate.
        setup: The tasks.
        generator: Randomness of this step for the method, a CPU generator.
    """

    def __init__(self, loop: Loop, step: int) -> None:
        self._loop, self.step, self.setup = loop, step, loop.setup
        self._group = loop.bench.optimizer.param_groups[0]
        self.lr = float(self._group["lr"])
        self.generator = torch.Generator().manual_seed(derive(loop.seed, "method", step))

    def losses(self, which: Which = "this") -> tuple[tuple[int, ...], Tensor]:
        """Return the tasks that have a label, as positions, and their weighted losses, at the current weights."""
        with torch.no_grad():
            found = self._compute(which, self.setup.tasks)
        present = tuple(i for i, task in enumerate(self.setup.tasks) if task in found)
        return present, torch.stack([found[self.setup.tasks[i]].detach().float() for i in present])

    def gradient(self, weights: dict[int, float], which: Which = "this") -> list[Tensor | None]:
        """Return ∇ Σ w_i L_i for every trainable parameter, at the current weights."""
        tasks = [self.setup.tasks[i] for i in weights]
        found = self._compute(which, tasks)
        parts = [found[self.setup.tasks[i]] * weight for i, weight in weights.items() if self.setup.tasks[i] in found]
        if not parts:
            return [None] * len(self.parameters)
        return list(torch.autograd.grad(torch.stack(parts).sum(), self.parameters, allow_unused=True))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters."""
        return self._loop.bench.layout.parameters

    def descent(self, gradient: Direction) -> list[Tensor | None]:
        """Return m + g + wd·θ: what the optimizer's momentum and weight decay make of a gradient, without its rate."""
        momentum, decay = float(self._group.get("momentum", 0.0)), float(self._group.get("weight_decay", 0.0))
        result: list[Tensor | None] = []
        for parameter, g in zip(self.parameters, gradient, strict=True):
            if g is None:
                result.append(None)
                continue
            total = g + decay * parameter.detach() if decay else g
            buffer = self._loop.bench.optimizer.state.get(parameter, {}).get("momentum_buffer")
            result.append(total + momentum * buffer if momentum and buffer is not None else total)
        return result

    @contextmanager
    def moved(self, direction: Direction, scale: float) -> Iterator[None]:
        """Work at θ + scale·direction; the weights come back bit for bit."""
        pairs = [(p, d) for p, d in zip(self.parameters, direction, strict=True) if d is not None]
        saved = [parameter.detach().clone() for parameter, _ in pairs]
        with torch.no_grad():
            for parameter, d in pairs:
                parameter.add_(d, alpha=scale)
        try:
            yield
        finally:
            with torch.no_grad():
                for (parameter, _), value in zip(pairs, saved, strict=True):
                    parameter.copy_(value)

    def _compute(self, which: Which, tasks: Sequence[str]) -> dict[str, Tensor]:
        loop = self._loop
        total: dict[str, Tensor] = {}
        with _statistics_frozen(loop.bench.model):
            for name, batch, seed in self._batches(which):
                asked = [task for task in loop.problem.stream_map[name].tasks if task in tasks]
                if which == "validation":
                    asked = [task for task in asked if task == loop.problem.target]
                if asked:
                    for item in self._uncut(name, batch, asked, seed):
                        total[item.task] = total[item.task] + item.scaled if item.task in total else item.scaled
        return total

    def _uncut(self, name: str, batch: Any, tasks: list[str], seed: int) -> list[TaskLoss]:
        """Losses whose graph reaches the parameters: a declared representation is not cut here."""
        return self._loop.losses_of(name, batch, tasks, self.step, seed, cut=False)

    def _batches(self, which: Which) -> list[tuple[str, Any, int]]:
        loop = self._loop
        if which == "this":
            return loop.last_batches
        seed = derive(loop.seed, which, self.step)
        found = []
        for name, stream in loop.problem.stream_map.items():
            if which == "validation":
                if loop.problem.target not in stream.tasks:
                    continue
                evaluation = loop.problem.target_validation
                extra = evaluation.dataset if evaluation.as_training is None else evaluation.as_training
                stream = replace(stream, dataset=extra)
            elif not any(task in self.setup.tasks for task in stream.tasks):
                continue
            for position, batch in enumerate(batches(name, stream, range(loop.training.accumulate), seed)):
                found.append((name, move(batch, loop.device), derive(seed, name, "forward", position)))
        return found


@contextmanager
def _statistics_frozen(model: nn.Module) -> Iterator[None]:
    """Let BatchNorm use the batch's statistics, as in training, without moving its running ones."""
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.track_running_stats
    ]
    for module in norms:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in norms:
            module.track_running_stats = True
