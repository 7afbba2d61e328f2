"""From the losses of a step to its gradients, by the rule of a method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.shared_parameters import GradientLayouts, dense
from forkmerge.engine.training.task_gradients import RepresentationGradients, TaskGradients, TaskLoss
from forkmerge.errors import ProblemError
from forkmerge.methods.base import GramianMethod, LossMethod, MatrixMethod, Method, MethodState, View, precise
from forkmerge.methods.context import Array, Setup
from forkmerge.problem.prefetch import move
from forkmerge.problem.randomness import derive, set_random_state

if TYPE_CHECKING:
    from forkmerge.engine.training.method_context import StepContext
    from forkmerge.engine.training.options import Training

Micros = list[list[TaskLoss]]
"""The losses of a step by micro-batch."""


class TaskCombiner:
    """Lets a method combine the tasks of a branch, step by step.

    A task whose loss or gradient is not finite is left out of the step and reported; so nothing a single task does
    can make the model's weights NaN. Under a loss method that takes reading losses and gradients back in every step,
    which is done only if `careful`.

    Args:
        method: The method.
        setup: What the method knows before the first step.
        binding: The module and optimizer.
        training: Options common to all branches.
        seed: Of the method's randomness.
        state: Saved with the branch and changed in place: the method's own, and which parameters are shared.
        careful: Whether a loss method's steps are looked at one by one.
    """

    def __init__(
        self,
        method: Method,
        setup: Setup,
        binding: ModelBinding,
        training: Training,
        seed: int,
        state: MethodState,
        *,
        careful: bool = True,
    ) -> None:
        if method.needs_target and setup.target is None:
            raise ProblemError(
                f"{type(method).__name__} compares auxiliaries with the target, which the branch that trains on "
                f"{', '.join(setup.tasks)} leaves out: give the target a weight there, or choose another method."
            )
        self.method, self.setup, self.binding, self.training, self.seed = method, setup, binding, training, seed
        self.careful = careful
        if not state:
            state.update(own=method.start(setup), shared=[])
        self.own: MethodState = state["own"]
        if isinstance(method, LossMethod):  # a state read from disk is on the CPU
            self.own.update({key: move(value, setup.device) for key, value in self.own.items() if _is_placed(value)})
        self.layouts = GradientLayouts(state["shared"])
        self.reports: dict[str, dict[str, int]] = {}

    def backward(self, micros: Micros, step: int, context: StepContext) -> None:
        """Set every parameter's gradient from the losses of a step."""
        labelled = {item.task for losses in micros for item in losses}
        present = [task for task in self.setup.tasks if task in labelled]
        if isinstance(self.method, LossMethod):
            self._weigh_losses(self.method, micros, present, step, context)
        else:
            self._weigh_gradients(micros, present, step, context)

    def report(self, what: str, task: str) -> None:
        """Count something odd about a task."""
        counts = self.reports.setdefault(what, {})
        counts[task] = counts.get(task, 0) + 1

    def _view(self, tasks: list[str], losses: Array | Tensor, step: int, context: StepContext) -> View:
        return View(
            setup=self.setup,
            present=tuple(self.setup.tasks.index(task) for task in tasks),
            raw_losses=losses,
            step=step,
            lr=self.binding.lr,
            seed=derive(self.seed, "method", step),
            context=context,
        )

    def _weigh_losses(
        self, method: LossMethod, micros: Micros, present: list[str], step: int, context: StepContext
    ) -> None:
        if self.careful:
            micros, present = self._with_finite_losses(micros, present)
            if not present:
                return
        items = [item for losses in micros for item in losses]
        parts = torch.stack([item.scaled for item in items])
        # Mostly there is one part per task, in the tasks' order.
        simple = [item.task for item in items] == present
        losses = (parts.detach() if simple else _sums(micros, present)).to(precise(self.setup.device))
        weights = method.weights(losses, self._view(present, losses, step, context), self.own)
        weights = torch.as_tensor(weights, dtype=losses.dtype, device=losses.device)
        self._check_shape(weights, len(present))
        if self.careful and not bool(weights.isfinite().all()):
            self.report(self._fallback(), "all tasks")
            weights = torch.ones_like(losses)
        factors = weights if simple else weights[[present.index(item.task) for item in items]]
        total = torch.dot(parts, factors.to(parts))
        if not total.requires_grad:
            return
        self.binding.scaler.scale(total).backward()
        # An enabled scaler looks for itself, and skips the step.
        if self.careful and not self.binding.scaler.is_enabled() and not _are_finite(self._gradients()):
            self._leave_out_bad(dict(zip(present, weights.tolist(), strict=True)), context)

    def _with_finite_losses(self, micros: Micros, present: list[str]) -> tuple[Micros, list[str]]:
        """Leave out tasks whose loss is not finite, and report them."""
        finite = _sums(micros, present).isfinite().tolist()
        good = [task for task, fine in zip(present, finite, strict=True) if fine]
        for task in present:
            if task not in good:
                self.report("not finite", task)
        return [[item for item in losses if item.task in good] for losses in micros], good

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.binding.layout.parameters if p.grad is not None]

    def _leave_out_bad(self, factors: dict[str, float], context: StepContext) -> None:
        """Differentiate the tasks one by one, and leave out those whose gradient is not finite."""
        self.binding.optimizer.zero_grad(set_to_none=True)
        for task, factor in factors.items():
            gradient = context.gradient({self.setup.tasks.index(task): factor})
            if not _are_finite([g for g in gradient if g is not None]):
                self.report("not finite", task)
                continue
            for parameter, g in zip(self.binding.layout.parameters, gradient, strict=True):
                if g is not None:
                    parameter.grad = g if parameter.grad is None else parameter.grad + g

    def _weigh_gradients(self, micros: Micros, present: list[str], step: int, context: StepContext) -> None:
        where, parameters = self.training.compared_at, self.binding.layout.parameters
        gradients: TaskGradients
        if where == "parameters":
            gradients = TaskGradients(parameters, present, self.layouts)
        else:
            gradients = RepresentationGradients(parameters, present, self.layouts, summed=where != "representation")
        sums = _sums(micros, present)
        scaler = self.binding.scaler
        for losses in micros:
            order = sorted(losses, key=lambda item: present.index(item.task))
            for item in order:
                item.scaled = scaler.scale(item.scaled)
            gradients.add(order)
        gradients.build()
        scale = scaler.get_scale() if scaler.is_enabled() else 1.0  # gradients stay scaled, for the scaler's own step
        gramian, totals, values = _read_back(gradients, sums)
        finite = np.isfinite(np.diagonal(gramian)) & np.isfinite(totals)
        if scaler.is_enabled() and not finite[np.isfinite(values)].all():
            gradients.apply(np.ones(len(present)))  # an overflow, which the scaler shall see, and skip the step
            return
        good = self._usable(gradients, finite & np.isfinite(values), gramian)
        if not good or not gradients.matrix:
            gradients.apply(np.zeros(len(present)))
            return
        view = self._view([present[row] for row in good], values[good], step, context.beside(gradients, good, scale))
        if isinstance(self.method, MatrixMethod):
            self._apply_direction(gradients, good, view, scale)
        else:
            self._apply_weights(gradients, good, view, gramian[np.ix_(good, good)] / scale**2)

    def _usable(self, gradients: TaskGradients, finite: Any, gramian: Array) -> list[int]:
        """Drop tasks whose gradient is not finite, and report them and those whose gradient is zero."""
        good = []
        for row, task in enumerate(gradients.tasks):
            if not finite[row]:
                gradients.drop(row)
                self.report("not finite", task)
            else:
                good.append(row)
                if gramian[row, row] == 0 and gradients.matrix:
                    self.report("zero", task)
        return good

    def _apply_weights(self, gradients: TaskGradients, good: list[int], view: View, gramian: Array) -> None:
        assert isinstance(self.method, GramianMethod)
        weights, heads = np.zeros(len(gradients.tasks)), np.zeros(len(gradients.tasks))
        weights[good] = self._checked(self.method.weights(gramian, view, self.own), len(good))
        own = self.method.head_weights(weights[good], view, self.own)
        if own is not None:
            heads[good] = self._checked(own, len(good))
        gradients.apply(weights, None if own is None else heads.tolist())

    def _apply_direction(self, gradients: TaskGradients, good: list[int], view: View, scale: float) -> None:
        assert isinstance(self.method, MatrixMethod)
        set_random_state(view.seed)
        blocks = gradients.matrix
        first = next(iter(blocks.values()))
        precise = torch.promote_types(first.dtype, torch.float32)
        joined = torch.cat([block[good].to(first.device, precise) for block in blocks.values()], dim=1) / scale
        direction = self.method.direction(joined, view, self.own)
        if not bool(direction.isfinite().all()):
            self.report(self._fallback(), "all tasks")
            direction = joined.sum(0)
        parts = (direction * scale).split([block.shape[1] for block in blocks.values()])
        gradients.apply_direction(
            {row: part.to(block) for (row, block), part in zip(blocks.items(), parts, strict=True)}
        )

    def _checked(self, weights: Any, tasks: int) -> Array:
        """Return weights if they are K finite numbers; equal ones stand in for those that are not finite."""
        values: Array = np.asarray(weights, dtype=np.float64)
        self._check_shape(values, tasks)
        if not np.isfinite(values).all():
            self.report(self._fallback(), "all tasks")
            return np.ones(tasks)
        return values

    def _check_shape(self, weights: Array | Tensor, tasks: int) -> None:
        if tuple(weights.shape) != (tasks,):
            raise ProblemError(
                f"{type(self.method).__name__} must return one weight per task of the step, [{tasks}], "
                f"got shape {list(weights.shape)}."
            )

    def _fallback(self) -> str:
        return f"summed, because what {type(self.method).__name__} made of it was not finite"


def _sums(micros: Micros, present: list[str]) -> Tensor:
    """Each task's loss over the micro-batches, [K]."""
    sums: dict[str, Tensor] = {}
    for losses in micros:
        for item in losses:
            value = item.scaled.detach()
            sums[item.task] = sums[item.task] + value if item.task in sums else value
    return torch.stack([sums[task] for task in present])


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in map(dense, tensors))


def _is_placed(value: object) -> bool:
    """Whether an entry of a method's state is a tensor or a list of them; what is nested deeper looks after itself."""
    return isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(item, Tensor) for item in value))


def _read_back(gradients: TaskGradients, sums: Tensor) -> tuple[Array, Array, Array]:
    """The Gramian [K, K], the sums of the heads' gradients [K] and the losses [K], in one transfer."""
    gramian = gradients.gramian()
    parts = [gramian.flatten(), gradients.own_totals().to(gramian), sums.to(gramian)]
    values = torch.cat(parts).cpu().double().numpy()
    tasks = len(gradients.tasks)
    return values[: tasks**2].reshape(tasks, tasks), values[tasks**2 : -tasks], values[-tasks:]
