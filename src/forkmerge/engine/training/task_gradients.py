"""Per-task gradients of one step: computed once, held as one flat matrix, combined by one product.

This is the only autograd code besides the plain backward pass of fixed weights. A parameter that two or more tasks
reach is *shared*: its gradients are the rows of a matrix [K, n], of which most methods need only the Gramian [K, K].
A parameter that one task reaches (its head) keeps that task's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from forkmerge.engine.training.shared_parameters import GradientLayouts, total_of
from forkmerge.errors import ProblemError

Array = npt.NDArray[np.float64]
_LONG_ROW = 1 << 18  # below, one matrix product is as fast

Cut = tuple[Tensor, Tensor]
"""A declared shared representation: the tensor the encoder made, and the leaf that the heads saw instead."""


@dataclass
class TaskLoss:
    """The loss of one task on one micro-batch.

    Args:
        task: Its name.
        raw: The loss as the problem gave it.
        scaled: Times the task weight, over the number of micro-batches: what is differentiated.
        stream: Where it was computed; losses of one stream may share a graph, others do not.
        cuts: The representations declared on the way to it.
    """

    task: str
    raw: Tensor
    scaled: Tensor
    stream: str = ""
    cuts: list[Cut] = field(default_factory=list)


def task_gradient(
    loss: Tensor, cuts: Sequence[Cut], parameters: Sequence[nn.Parameter], keep: bool
) -> list[Tensor | None]:
    """Return the gradient of one loss for every parameter, None where the loss does not reach it.

    With cuts, the heads are differentiated down to the representation and the encoder from there, so K tasks cost
    one pass through every head and K products with the encoder.

    Args:
        loss: A scalar.
        cuts: Declared representations between the loss and the encoder.
        parameters: What to differentiate for.
        keep: Whether the encoder's graph is needed again by another task.
    """
    if not loss.requires_grad:
        return [None] * len(parameters)
    if not cuts:
        return list(torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=keep))
    leaves = [leaf for _, leaf in cuts]
    gradients = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True, retain_graph=True)
    result: list[Tensor | None] = list(gradients[len(leaves) :])
    nested = len(cuts) > 1  # one representation may have been made from another
    pending: list[Tensor | None] = list(gradients[: len(leaves)])
    while any(g is not None for g in pending):
        pairs = [(z, g) for (z, _), g in zip(cuts, pending, strict=True) if g is not None]
        below = torch.autograd.grad(
            [z for z, _ in pairs],
            [*leaves, *parameters] if nested else parameters,
            grad_outputs=[g for _, g in pairs],
            allow_unused=True,
            retain_graph=keep or nested,
        )
        pending = list(below[: len(leaves)]) if nested else []
        result = add_gradients(result, below[len(leaves) :] if nested else below)
    return result


def add_gradients(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add two lists of gradients, in which None is zero."""
    return [a if b is None else b if a is None else a + b for a, b in zip(first, second, strict=True)]


class TaskGradients:
    """The gradients of all tasks of a step, summed over its micro-batches.

    A gradient is moved into the matrix as soon as it is there, if the last step with the same tasks reached the same
    parameters, so that only one task's gradient is ever held twice.

    Args:
        parameters: All trainable parameters.
        tasks: The K tasks of the step.
        layouts: Those of earlier steps; this step's is added.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tasks: Sequence[str], layouts: GradientLayouts) -> None:
        self.parameters, self.tasks = list(parameters), list(tasks)
        self.matrix: dict[str, Tensor] = {}
        self._layouts = layouts
        self._layout = layouts.get(tasks)
        self._own: list[list[Tensor | None]] = [[] for _ in tasks]
        if self._layout is not None:
            self.matrix = self._layout.shared.matrix(len(self.tasks))

    def add(self, losses: Sequence[TaskLoss]) -> None:
        """Add one micro-batch; a task may have no label in it, or a part of its loss from several streams."""
        last_use = {item.stream: index for index, item in enumerate(losses)}
        for index, item in enumerate(losses):
            row = self.tasks.index(item.task)
            grads = task_gradient(item.scaled, item.cuts, self.parameters, last_use[item.stream] > index)
            if self._own[row]:
                grads = self._plus(grads, row)
            self._own[row] = grads
            self._stream(row)

    def build(self) -> None:
        """Move shared gradients into one matrix per dtype, unless they are there already."""
        if self._layout is not None:
            return
        reached = [tuple(g is not None for g in grads) for grads in self._own]
        self._layout = self._layouts.make(self.tasks, reached, self.parameters)
        self.matrix = self._layout.shared.matrix(len(self.tasks))
        for row in range(len(self.tasks)):
            self._stream(row)

    def _stream(self, row: int) -> None:
        """Move a task's shared gradients into the matrix if it reaches what the layout says; else give that up."""
        if self._layout is None:
            return
        grads = self._own[row]
        if tuple(g is not None for g in grads) != self._layout.reached[row]:
            self._drop_layout(row)
            return
        self._layout.shared.write(row, len(self.tasks), grads)
        for i in self._layout.shared.positions:
            grads[i] = None

    def _plus(self, grads: list[Tensor | None], row: int) -> list[Tensor | None]:
        """Add the gradients of an earlier micro-batch."""
        return add_gradients(self._own[row] if self._layout is None else self._whole(row), grads)

    def _whole(self, row: int) -> list[Tensor | None]:
        """A task's gradients with those already in the matrix."""
        assert self._layout is not None
        grads = list(self._own[row])
        for i, view in zip(self._layout.shared.positions, self._layout.shared.views(row, len(self.tasks)), strict=True):
            if self._layout.reached[row][i]:
                grads[i] = view.clone()
        return grads

    def _drop_layout(self, current: int) -> None:
        for row in range(len(self.tasks)):
            if self._own[row] and row != current:
                self._own[row] = self._whole(row)
        self._layout = None

    def gramian(self) -> Tensor:
        """Return G_ij = ⟨g_i, g_j⟩ over the shared parameters, [K, K], on the device."""
        blocks = [_gramian(block) for block in self.matrix.values()]
        if not blocks:
            return torch.zeros(len(self.tasks), len(self.tasks))
        return blocks[0] if len(blocks) == 1 else torch.stack([b.to(blocks[0]) for b in blocks]).sum(0)

    def own_totals(self) -> Tensor:
        """Return the sum of every task's gradients outside the matrix, [K]: NaN or infinite if an entry is."""
        device = self.parameters[0].device
        return torch.stack([total_of([g for g in grads if g is not None]).to(device) for grads in self._own])

    def products(self, direction: Sequence[Tensor | None]) -> Tensor | None:
        """Return ⟨g_k, v⟩ over the shared parameters for a vector v given for all of them, [K]; None if unknown."""
        assert self._layout is not None
        vector = self._layout.shared.flatten(direction)
        parts = [block @ vector[row] for row, block in self.matrix.items()]
        return torch.stack([part.to(parts[0]) for part in parts]).sum(0) if parts else None

    def drop(self, row: int) -> None:
        """Forget one task's gradient, e.g. because it is not finite."""
        for block in self.matrix.values():
            block[row].zero_()
        self._own[row] = [None] * len(self.parameters)

    def apply(self, weights: Tensor | Array, head_weights: Sequence[float] | None = None) -> None:
        """Set `.grad` of shared parameters to Σ_k w_k g_k, and of heads to their own gradients.

        Args:
            weights: w, [K].
            head_weights: Factors of the heads' gradients; None leaves them unweighted.
        """
        directions = {
            row: torch.as_tensor(weights, dtype=block.dtype, device=block.device) @ block
            for row, block in self.matrix.items()
        }
        self.apply_direction(directions, head_weights)

    def apply_direction(self, directions: dict[str, Tensor], head_weights: Sequence[float] | None = None) -> None:
        """Set `.grad` of shared parameters to a given direction, one vector per matrix block."""
        assert self._layout is not None
        self._layout.shared.assign(directions)
        for row, grads in enumerate(self._own):
            own = [(p, g) for p, g in zip(self.parameters, grads, strict=True) if g is not None]
            if head_weights is not None and own:
                torch._foreach_mul_([g for _, g in own], float(head_weights[row]))
            for parameter, gradient in own:
                parameter.grad = gradient


def _gramian(block: Tensor) -> Tensor:
    """Return block @ blockᵀ; long rows by matrix–vector products, which read them at the speed of memory."""
    tasks, size = block.shape
    if size < _LONG_ROW:
        return block @ block.mT
    result = block.new_empty(tasks, tasks)
    for k in range(tasks):
        result[k, k:] = result[k:, k] = torch.mv(block[k:], block[k])
    return result


class RepresentationGradients(TaskGradients):
    """Gradients at the declared representation in place of the shared parameters (MGDA-UB, Sener and Koltun 2018).

    The matrix holds ∂L_k/∂z, [K, size of z]; the combined one goes through the encoder once. An upper bound of what
    the exact Gramian measures, at the cost of one backward pass; shared parameters above the cut get plain sums.

    Args:
        parameters: All trainable parameters.
        tasks: The K tasks of the step.
        layouts: Those of earlier steps.
        summed: Whether the Gramian is that of gradients summed over the batch, the representation's first dimension, as
            in LibMTL. The combination is not: it goes through the encoder example by example.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        tasks: Sequence[str],
        layouts: GradientLayouts,
        *,
        summed: bool = False,
    ) -> None:
        super().__init__(parameters, tasks, layouts)
        self.summed = summed

    def gramian(self) -> Tensor:
        """Return the Gramian of the gradients at the representation, of each example's or of their sums."""
        block = self.matrix["representation"]
        if not self.summed:
            return _gramian(block)
        parts = block.split([leaf.numel() for _, leaf in self.cuts], dim=1)
        shaped = [part.view(len(block), *leaf.shape) for part, (_, leaf) in zip(parts, self.cuts, strict=True)]
        return _gramian(torch.cat([part.sum(1).flatten(1) for part in shaped], dim=1))

    def add(self, losses: Sequence[TaskLoss]) -> None:
        """Differentiate every loss down to the representation."""
        cuts = losses[0].cuts
        if not cuts or any([id(z) for z, _ in item.cuts] != [id(z) for z, _ in cuts] for item in losses):
            raise ProblemError(
                "gradients at the representation need one that all tasks share: mark it in the losses with "
                "z = context.shared(encoder(x)), or use gradients='parameters'."
            )
        self.cuts = list(cuts)
        leaves = [leaf for _, leaf in cuts]
        rows = []
        for item in losses:
            inputs = [*leaves, *self.parameters]
            gradients: Sequence[Tensor | None] = [None] * len(inputs)
            if item.scaled.requires_grad:
                gradients = torch.autograd.grad(item.scaled, inputs, allow_unused=True, retain_graph=True)
            at = [torch.zeros_like(z) if g is None else g for z, g in zip(leaves, gradients, strict=False)]
            rows.append(torch.cat([g.reshape(-1) for g in at]))
            self._own[self.tasks.index(item.task)] = list(gradients[len(leaves) :])
        self.matrix = {"representation": torch.stack(rows)}

    def build(self) -> None:
        """Do nothing: the matrix is there already."""

    def products(self, direction: Sequence[Tensor | None]) -> Tensor | None:
        """Return None: the matrix says nothing about parameters."""
        del direction
        return None

    def apply_direction(self, directions: dict[str, Tensor], head_weights: Sequence[float] | None = None) -> None:
        """Send a direction through the encoder, once."""
        parts = directions["representation"].split([leaf.numel() for _, leaf in self.cuts])
        pairs = [(z, part.view_as(z)) for (z, _), part in zip(self.cuts, parts, strict=True)]
        while pairs:
            torch.autograd.backward([z for z, _ in pairs], [part for _, part in pairs], retain_graph=len(self.cuts) > 1)
            pairs = [(z, leaf.grad) for z, leaf in self.cuts if leaf.grad is not None]  # made from one another
            for _, leaf in self.cuts:
                leaf.grad = None
        for row, grads in enumerate(self._own):
            for parameter, gradient in zip(self.parameters, grads, strict=True):
                if gradient is None:
                    continue
                own = gradient if head_weights is None else gradient * float(head_weights[row])
                parameter.grad = own if parameter.grad is None else parameter.grad + own
