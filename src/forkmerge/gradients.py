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

from forkmerge.errors import ProblemError
from forkmerge.state import Layout

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
        cuts: The representations declared on the way to it.
    """

    task: str
    raw: Tensor
    scaled: Tensor
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
    if not cuts:
        return list(torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=keep))
    leaves = [leaf for _, leaf in cuts]
    found = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True, retain_graph=True)
    heads = found[len(leaves) :]
    pairs = [(made, g) for (made, _), g in zip(cuts, found, strict=False) if g is not None and made.requires_grad]
    if not pairs:
        return list(heads)
    body = torch.autograd.grad(
        [made for made, _ in pairs],
        parameters,
        grad_outputs=[g for _, g in pairs],
        allow_unused=True,
        retain_graph=keep,
    )
    return [
        below if above is None else above if below is None else above + below
        for above, below in zip(heads, body, strict=True)
    ]


@dataclass
class Plan:
    """Which parameters each task of a step reaches, and the memory for the shared ones; the same for most steps."""

    reached: list[tuple[bool, ...]]
    shared: SharedLayout


Plans = dict[tuple[str, ...], Plan]
"""Plans of earlier steps by their tasks."""


class TaskGradients:
    """The gradients of all tasks of a step, summed over its micro-batches.

    A gradient is moved into the matrix as soon as it is there, if the last step with the same tasks reached the same
    parameters, so that only one task's gradient is ever held twice.

    Args:
        parameters: All trainable parameters.
        tasks: The K tasks of the step.
        plans: Plans of earlier steps; this step's is added.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tasks: Sequence[str], plans: Plans) -> None:
        self.parameters, self.tasks = list(parameters), list(tasks)
        self.matrix: dict[str, Tensor] = {}
        self._plans = plans
        self._plan = plans.get(tuple(tasks))
        self._own: list[list[Tensor | None]] = [[] for _ in tasks]
        if self._plan is not None:
            self.matrix = self._plan.shared.matrix(len(self.tasks))

    def add(self, losses: Sequence[TaskLoss]) -> None:
        """Add one micro-batch; a task may have no label in it."""
        last_use = {id(made): index for index, item in enumerate(losses) for made, _ in item.cuts}
        uncut = [index for index, item in enumerate(losses) if not item.cuts]
        for index, item in enumerate(losses):
            if item.cuts:
                keep = any(last_use[id(made)] > index for made, _ in item.cuts)
            else:
                keep = index != uncut[-1]  # two losses of one stream may share a graph
            row = self.tasks.index(item.task)
            grads = task_gradient(item.scaled, item.cuts, self.parameters, keep)
            if self._own[row]:
                grads = self._plus(grads, row)
            self._own[row] = grads
            self._stream(row)

    def build(self) -> None:
        """Move shared gradients into one matrix per dtype, unless they are there already."""
        if self._plan is not None:
            return
        reached = [tuple(g is not None for g in grads) for grads in self._own]
        counts = [sum(column) for column in zip(*reached, strict=True)]
        shared = SharedLayout(self.parameters, [i for i, count in enumerate(counts) if count > 1])
        self._plan = self._plans[tuple(self.tasks)] = Plan(reached, shared)
        self.matrix = shared.matrix(len(self.tasks))
        for row in range(len(self.tasks)):
            self._stream(row)

    def _stream(self, row: int) -> None:
        """Move a task's shared gradients into the matrix if it reaches what the plan says; else give up the plan."""
        if self._plan is None:
            return
        grads = self._own[row]
        if tuple(g is not None for g in grads) != self._plan.reached[row]:
            self._unplan(row)
            return
        self._plan.shared.write(row, len(self.tasks), grads)
        for i in self._plan.shared.positions:
            grads[i] = None

    def _plus(self, grads: list[Tensor | None], row: int) -> list[Tensor | None]:
        """Add the gradients of an earlier micro-batch."""
        before = self._own[row] if self._plan is None else self._whole(row)
        return [
            new if old is None else old if new is None else old + new for old, new in zip(before, grads, strict=True)
        ]

    def _whole(self, row: int) -> list[Tensor | None]:
        """A task's gradients with those already in the matrix."""
        assert self._plan is not None
        grads = list(self._own[row])
        for i, view in zip(self._plan.shared.positions, self._plan.shared.views(row, len(self.tasks)), strict=True):
            if self._plan.reached[row][i]:
                grads[i] = view.clone()
        return grads

    def _unplan(self, current: int) -> None:
        for row in range(len(self.tasks)):
            if self._own[row] and row != current:
                self._own[row] = self._whole(row)
        self._plan = None

    def gramian(self) -> Tensor:
        """Return G_ij = ⟨g_i, g_j⟩ over the shared parameters, [K, K], on the device."""
        blocks = [_gramian(block) for block in self.matrix.values()]
        if not blocks:
            return torch.zeros(len(self.tasks), len(self.tasks))
        return blocks[0] if len(blocks) == 1 else torch.stack([b.to(blocks[0]) for b in blocks]).sum(0)

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
        assert self._plan is not None
        self._plan.shared.assign(directions)
        for row, grads in enumerate(self._own):
            own = [(p, g) for p, g in zip(self.parameters, grads, strict=True) if g is not None]
            if head_weights is not None and own:
                torch._foreach_mul_([g for _, g in own], float(head_weights[row]))
            for parameter, gradient in own:
                parameter.grad = gradient


class SharedLayout:
    """Where shared parameters lie in the matrix's columns; one block per dtype.

    Args:
        parameters: All trainable parameters.
        positions: Which of them are shared.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], positions: list[int]) -> None:
        self.positions = positions
        self.parameters = [parameters[i] for i in positions]
        holder = nn.Module()
        holder.shared = nn.ParameterList(self.parameters)
        self.layout = Layout(holder)
        self._blocks: dict[int, dict[str, Tensor]] = {}
        self._views: dict[int, list[list[Tensor]]] = {}

    def matrix(self, tasks: int) -> dict[str, Tensor]:
        """Return blocks [K, n] to write gradients into; the same memory every step, its padding always zero.

        Fresh memory of this size would cost more than the arithmetic done on it.
        """
        if tasks not in self._blocks:
            pairs = zip(self.layout.places, self.parameters, strict=True)
            firsts = {place.row: parameter for place, parameter in reversed(list(pairs))}
            blocks = {
                row: torch.zeros(tasks, size, dtype=firsts[row].dtype, device=firsts[row].device)
                for row, size in self.layout.sizes.items()
            }
            self._blocks[tasks] = blocks
            self._views[tasks] = [
                [place.view(blocks[place.row][k]) for place in self.layout.places] for k in range(tasks)
            ]
        return self._blocks[tasks]

    def views(self, row: int, tasks: int) -> list[Tensor]:
        """Return one task's row as tensors of the parameters' shapes."""
        return self._views[tasks][row]

    def write(self, row: int, tasks: int, gradients: Sequence[Tensor | None]) -> None:
        """Write one task's gradients, given for all parameters, into its row; what it does not reach is zero."""
        pairs = list(zip(self.views(row, tasks), (gradients[i] for i in self.positions), strict=True))
        missing = [view for view, gradient in pairs if gradient is None]
        if missing:
            torch._foreach_zero_(missing)
        found = [(view, _dense(gradient)) for view, gradient in pairs if gradient is not None]
        if found:
            torch._foreach_copy_([view for view, _ in found], [gradient for _, gradient in found])

    def assign(self, directions: dict[str, Tensor]) -> None:
        """Let the parameters' gradients be views of the direction."""
        for place, parameter in zip(self.layout.places, self.parameters, strict=True):
            parameter.grad = place.view(directions[place.row])


def _gramian(block: Tensor) -> Tensor:
    """Return block @ blockᵀ; long rows by matrix–vector products, which read them at the speed of memory."""
    tasks, size = block.shape
    if size < _LONG_ROW:
        return block @ block.mT
    result = block.new_empty(tasks, tasks)
    for k in range(tasks):
        result[k, k:] = result[k:, k] = torch.mv(block[k:], block[k])
    return result


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


class RepresentationGradients(TaskGradients):
    """Gradients at the declared representation in place of the shared parameters (MGDA-UB, Sener and Koltun 2018).

    The matrix holds ∂L_k/∂z, [K, size of z]; the combined one goes through the encoder once. An upper bound of what
    the exact Gramian measures, at the cost of one backward pass; shared parameters above the cut get plain sums.
    """

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
            found = torch.autograd.grad(item.scaled, [*leaves, *self.parameters], allow_unused=True, retain_graph=True)
            at = [torch.zeros_like(z) if g is None else g for z, g in zip(leaves, found, strict=False)]
            rows.append(torch.cat([g.reshape(-1) for g in at]))
            self._own[self.tasks.index(item.task)] = list(found[len(leaves) :])
        self.matrix = {"representation": torch.stack(rows)}

    def build(self) -> None:
        """Do nothing: the matrix is there already."""

    def apply_direction(self, directions: dict[str, Tensor], head_weights: Sequence[float] | None = None) -> None:
        """Send a direction through the encoder, once."""
        sizes = [leaf.numel() for _, leaf in self.cuts]
        parts = directions["representation"].split(sizes)
        pairs = [(z, part.view_as(z)) for (z, _), part in zip(self.cuts, parts, strict=True) if z.requires_grad]
        torch.autograd.backward([z for z, _ in pairs], [part for _, part in pairs])
        for row, grads in enumerate(self._own):
            for parameter, gradient in zip(self.parameters, grads, strict=True):
                if gradient is None:
                    continue
                own = gradient if head_weights is None else gradient * float(head_weights[row])
                parameter.grad = own if parameter.grad is None else parameter.grad + own
