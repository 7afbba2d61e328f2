"""The steps of one segment: losses, their combination, the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forkmerge.feed import batches, move
from forkmerge.gradients import Plans, RepresentationGradients, TaskGradients, TaskLoss
from forkmerge.methods._base import (
    GramianMethod,
    LossMethod,
    MatrixMethod,
    MethodState,
    Setup,
    View,
    has_hook,
)
from forkmerge.order import derive, pick_task, set_random_state
from forkmerge.probe import Probe
from forkmerge.problem import Context, Problem, Stream
from forkmerge.scoring import device_of
from forkmerge.workbench import Workbench

if TYPE_CHECKING:
    from forkmerge.branch import Mixture, Training


class Loop:
    """The steps of one segment of one branch.

    Args:
        bench: The module and optimizer, with the branch's state attached.
        problem: Where batches and losses come from.
        mixture: The branch's task weights.
        training: Options common to all branches.
        seed: Of the order of examples and all randomness.
        steps: The global steps to do.
        method_state: The method's state, changed in place; empty before the first step.
    """

    def __init__(
        self,
        bench: Workbench,
        problem: Problem,
        mixture: Mixture,
        training: Training,
        seed: int,
        steps: range,
        method_state: MethodState,
    ) -> None:
        self.bench, self.problem, self.mixture = bench, problem, mixture
        self.training, self.seed, self.steps = training, seed, steps
        self.device = device_of(bench.model)
        self.losses: dict[str, list[Tensor]] = {}
        self.untouched: list[str] = []
        self.reports: dict[str, dict[str, int]] = {}
        active = tuple(mixture.active(problem.tasks))
        self.method = training.method if len(active) > 1 else None
        self.setup = Setup(
            active, active.index(problem.target) if problem.target in active else None, self._epoch(), self.device
        )
        self.method_state = method_state
        self._plans: Plans = {}
        self._cuts = self.method is not None and not isinstance(self.method, LossMethod)
        self.last_batches: list[tuple[str, Any, int]] = []
        if self.method is not None and not method_state:
            method_state.update({"started": True, **self.method.start(self.setup)})

    def run(self) -> None:
        """Do the steps."""
        plan = [self._tasks_of(step) for step in self.steps]
        feeds = {name: self._feed(name, stream, plan) for name, stream in self.problem.stream_map.items()}
        for step, weights in zip(self.steps, plan, strict=True):
            self.bench.optimizer.zero_grad(set_to_none=True)
            if self.method is None:
                has_loss = self._backward_plain(feeds, weights, step)
            else:
                has_loss = self._backward_with_method(feeds, weights, step)
            if step == self.steps.start:
                self.untouched = self._without_gradient()
            self._update(has_loss)
            if self.method is not None and has_hook(self.method, "after_step"):
                self.method.after_step(Probe(self, step), self.method_state)

    def mean_losses(self) -> dict[str, float]:
        """The mean loss of every task over the segment: the only read-back of plain training."""
        return {task: torch.stack(losses).float().mean().item() for task, losses in self.losses.items()}

    def losses_of(
        self, name: str, batch: Any, tasks: list[str], step: int, seed: int, *, cut: bool = False
    ) -> list[TaskLoss]:
        """Compute a stream's losses on a batch, under the random state of `seed`; cut at declared representations."""
        stream = self.problem.stream_map[name]
        set_random_state(seed)
        cuts: list[tuple[Tensor, Tensor]] | None = [] if cut else None
        with self.training.autocast(self.device):
            found = stream.losses(self.bench.model, batch, tasks, Context(step, seed, cuts))
            result = []
            for task in tasks:
                loss = found.get(task)
                if loss is None:
                    continue
                factor = self.mixture_weight(task) / self.training.accumulate
                result.append(TaskLoss(task, loss, loss if factor == 1 else loss * factor, cuts or []))
        return result

    def mixture_weight(self, task: str) -> float:
        """ν of a task; a sampled step has weight 1."""
        if self.problem.weights == "sampling" and self.method is None:
            return 1.0
        return float(self.mixture.task_weights[task])

    def _epoch(self) -> int:
        """Steps of one pass over the target's training data."""
        sizes = [
            len(stream.dataset) / stream.batch_size  # type: ignore[arg-type]  # checked by Problem
            for stream in self.problem.stream_map.values()
            if self.problem.target in stream.tasks
        ]
        return max(int(np.ceil(max(sizes) / self.training.accumulate)), 1)

    def _tasks_of(self, step: int) -> tuple[str, ...]:
        """The tasks a step trains on; a method always combines all of them."""
        active = self.setup.tasks
        if self.problem.weights == "loss" or self.method is not None:
            return active
        weights = [float(self.mixture.task_weights[task]) for task in active]
        return (pick_task(active, weights, self.seed, step),)

    def _feed(self, name: str, stream: Stream, plan: list[tuple[str, ...]]) -> Iterator[Any]:
        accumulate = self.training.accumulate
        positions = [
            step * accumulate + micro
            for step, tasks in zip(self.steps, plan, strict=True)
            if any(task in tasks for task in stream.tasks)
            for micro in range(accumulate)
        ]
        return batches(name, stream, positions, self.seed, self.training.loader_workers if positions else 0)

    def _micro_batch(
        self, feeds: dict[str, Iterator[Any]], tasks: tuple[str, ...], step: int, micro: int
    ) -> list[TaskLoss]:
        """The losses of one micro-batch over all streams; remembers them for the means, and batches for probes."""
        position = step * self.training.accumulate + micro
        result: list[TaskLoss] = []
        for name, stream in self.problem.stream_map.items():
            asked = [task for task in stream.tasks if task in tasks]
            if not asked:
                continue
            batch = move(next(feeds[name]), self.device)
            seed = derive(self.seed, name, "forward", position)
            if self.method is not None:
                self.last_batches.append((name, batch, seed))
            result += self.losses_of(name, batch, asked, step, seed, cut=self._cuts)
        for item in result:
            self.losses.setdefault(item.task, []).append(item.raw.detach())
        return result

    def _backward_plain(self, feeds: dict[str, Iterator[Any]], tasks: tuple[str, ...], step: int) -> bool:
        """Differentiate the sum of the weighted losses; False if there was no label for any task."""
        has_loss = False
        for micro in range(self.training.accumulate):
            losses = self._micro_batch(feeds, tasks, step, micro)
            if losses:
                total = losses[0].scaled
                for item in losses[1:]:
                    total = total + item.scaled
                self.bench.scaler.scale(total).backward()
                has_loss = True
        return has_loss

    def _backward_with_method(self, feeds: dict[str, Iterator[Any]], tasks: tuple[str, ...], step: int) -> bool:
        """Let the method combine the tasks; a step with one label only is a plain one."""
        assert self.method is not None
        self.last_batches = []
        micros = [self._micro_batch(feeds, tasks, step, micro) for micro in range(self.training.accumulate)]
        present = [task for task in self.setup.tasks if any(item.task == task for losses in micros for item in losses)]
        if not present:
            return False
        if has_hook(self.method, "before_step"):
            self.method.before_step(Probe(self, step), self.method_state)
        if isinstance(self.method, LossMethod):
            self._weigh_losses(self.method, micros, present, step)
        else:
            self._weigh_gradients(micros, present, step)
        return True

    def view(self, present: list[str], micros: list[list[TaskLoss]], step: int) -> View:
        """What the method sees of a step."""
        sums: dict[str, Tensor] = {}
        for losses in micros:
            for item in losses:
                value = item.scaled.detach()
                sums[item.task] = sums[item.task] + value if item.task in sums else value
        return View(
            setup=self.setup,
            present=tuple(self.setup.tasks.index(task) for task in present),
            losses=torch.stack([sums[task].float() for task in present]),
            step=step,
            lr=float(self.bench.optimizer.param_groups[0]["lr"]),
            generator=torch.Generator().manual_seed(derive(self.seed, "method", step)),
        )

    def _weigh_losses(self, method: LossMethod, micros: list[list[TaskLoss]], present: list[str], step: int) -> None:
        weights = method.weights(self.view(present, micros, step), self.method_state)
        total: Tensor | None = None
        for losses in micros:
            for item in losses:
                part = item.scaled * weights[present.index(item.task)]
                total = part if total is None else total + part
        assert total is not None
        self.bench.scaler.scale(total).backward()

    def _weigh_gradients(self, micros: list[list[TaskLoss]], present: list[str], step: int) -> None:
        kind = RepresentationGradients if self.training.gradients == "representation" else TaskGradients
        gradients = kind(self.bench.layout.parameters, present, self._plans)
        scaler = self.bench.scaler
        for losses in micros:
            order = sorted(losses, key=lambda item: present.index(item.task))
            for item in order:
                item.scaled = scaler.scale(item.scaled)
            gradients.add(order)
        gradients.build()
        scale = scaler.get_scale() if scaler.is_enabled() else 1.0  # gradients stay scaled, for the scaler's own step
        gramian = gradients.gramian().double().cpu().numpy() / scale**2  # the one read-back of a step
        good = self._usable(gradients, gramian)
        names = [gradients.tasks[row] for row in good]
        weights = np.zeros(len(gradients.tasks))
        if isinstance(self.method, MatrixMethod) and len(good) > 1:
            self._apply_direction(gradients, good, self.view(names, micros, step), scale)
            return
        if isinstance(self.method, GramianMethod) and len(good) > 1:
            view = self.view(names, micros, step)
            weights[good] = self.method.weights(gramian[np.ix_(good, good)], view, self.method_state)
        else:
            weights[good] = 1.0
        weighs_heads = self.method is not None and self.method.weighs_heads
        gradients.apply(weights, list(weights) if weighs_heads else None)

    def _apply_direction(self, gradients: TaskGradients, good: list[int], view: View, scale: float) -> None:
        assert isinstance(self.method, MatrixMethod)
        set_random_state(derive(self.seed, "method", view.step))
        blocks = gradients.matrix
        joined = torch.cat([block[good].float() for block in blocks.values()], dim=1) / scale
        direction = self.method.direction(joined, view, self.method_state) * scale
        parts = direction.split([block.shape[1] for block in blocks.values()])
        gradients.apply_direction(
            {row: part.to(block.dtype) for (row, block), part in zip(blocks.items(), parts, strict=True)}
        )

    def _usable(self, gradients: TaskGradients, gramian: Any) -> list[int]:
        """Drop tasks whose gradient is not finite, and report them and those whose gradient is zero."""
        good = []
        for row, task in enumerate(gradients.tasks):
            square = gramian[row, row]
            if not np.isfinite(square):
                gradients.drop(row)
                self._report("not finite", task)
            else:
                good.append(row)
                if square == 0:
                    self._report("zero", task)
        return good

    def _report(self, what: str, task: str) -> None:
        counts = self.reports.setdefault(what, {})
        counts[task] = counts.get(task, 0) + 1

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
