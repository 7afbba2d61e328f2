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


class TaskGradients:
    """The gradients of all tasks of a step, summed over its micro-batches.

    Args:
        parameters: All trainable parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.tasks: list[str] = []
        self._grads: list[list[Tensor | None]] = []
        self._layout: SharedLayout | None = None
        self.matrix: dict[str, Tensor] = {}

    def add(self, losses: Sequence[TaskLoss]) -> None:
        """Add one micro-batch; a task that had no label in earlier ones joins now."""
        last_use = {id(made): index for index, item in enumerate(losses) for made, _ in item.cuts}
        uncut = [index for index, item in enumerate(losses) if not item.cuts]
        for index, item in enumerate(losses):
            if item.cuts:
                keep = any(last_use[id(made)] > index for made, _ in item.cuts)
            else:
                keep = index != uncut[-1]  # two losses of one stream may share a graph
            grads = task_gradient(item.scaled, item.cuts, self.parameters, keep)
            if item.task not in self.tasks:
                self.tasks.append(item.task)
                self._grads.append(grads)
                continue
            row = self.tasks.index(item.task)
            self._grads[row] = [
                new if old is None else old if new is None else old + new
                for old, new in zip(self._grads[row], grads, strict=True)
            ]

    def build(self, layouts: dict[tuple[int, ...], SharedLayout]) -> None:
        """Move shared gradients into one matrix per dtype.

        Args:
            layouts: A cache of layouts by the shared parameters' positions.
        """
        reached = [sum(grads[i] is not None for grads in self._grads) for i in range(len(self.parameters))]
        shared = tuple(i for i, count in enumerate(reached) if count > 1)
        if shared not in layouts:
            layouts[shared] = SharedLayout([self.parameters[i] for i in shared])
        self._layout = layouts[shared]
        self.matrix = self._layout.new_matrix(len(self.tasks))
        for row, grads in enumerate(self._grads):
            self._layout.write(self.matrix, row, [grads[i] for i in shared])
            for i in shared:
                grads[i] = None

    def gramian(self) -> Tensor:
        """Return G_ij = ⟨g_i, g_j⟩ over the shared parameters, [K, K], on the device."""
        blocks = [block @ block.mT for block in self.matrix.values()]
        if not blocks:
            return torch.zeros(len(self.tasks), len(self.tasks))
        return blocks[0] if len(blocks) == 1 else torch.stack([b.to(blocks[0]) for b in blocks]).sum(0)

    def drop(self, row: int) -> None:
        """Forget one task's gradient, e.g. because it is not finite."""
        for block in self.matrix.values():
            block[row].zero_()
        self._grads[row] = [None] * len(self.parameters)

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
        self._layout.assign(directions)
        for row, grads in enumerate(self._grads):
            own = [(p, g) for p, g in zip(self.parameters, grads, strict=True) if g is not None]
            if head_weights is not None and own:
                torch._foreach_mul_([g for _, g in own], float(head_weights[row]))
            for parameter, gradient in own:
                parameter.grad = gradient


class SharedLayout:
    """Where shared parameters lie in the matrix's columns; one block per dtype."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        holder = nn.Module()
        holder.shared = nn.ParameterList(parameters)
        self.layout = Layout(holder) if parameters else None
        self.parameters = parameters

    def new_matrix(self, tasks: int) -> dict[str, Tensor]:
        """Return blocks of zeros [K, n]: zeros, because padding between parameters is part of a row."""
        if self.layout is None:
            return {}
        firsts = {place.row: p for place, p in reversed(list(zip(self.layout.places, self.parameters, strict=True)))}
        return {
            row: torch.zeros(tasks, size, dtype=firsts[row].dtype, device=firsts[row].device)
            for row, size in self.layout.sizes.items()
        }

    def write(self, matrix: dict[str, Tensor], row: int, gradients: Sequence[Tensor | None]) -> None:
        """Write one task's gradients into a row."""
        if self.layout is None:
            return
        pairs = [
            (place.view(matrix[place.row][row]), gradient)
            for place, gradient in zip(self.layout.places, gradients, strict=True)
            if gradient is not None
        ]
        torch._foreach_copy_([view for view, _ in pairs], [_dense(gradient) for _, gradient in pairs])

    def assign(self, directions: dict[str, Tensor]) -> None:
        """Let the parameters' gradients be views of the direction."""
        if self.layout is None:
            return
        for place, parameter in zip(self.layout.places, self.parameters, strict=True):
            parameter.grad = place.view(directions[place.row])


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
        self.cuts, self.tasks = list(cuts), [item.task for item in losses]
        leaves = [leaf for _, leaf in cuts]
        rows = []
        for item in losses:
            found = torch.autograd.grad(item.scaled, [*leaves, *self.parameters], allow_unused=True, retain_graph=True)
            at = [torch.zeros_like(z) if g is None else g for z, g in zip(leaves, found, strict=False)]
            rows.append(torch.cat([g.reshape(-1) for g in at]))
            self._grads.append(list(found[len(leaves) :]))
        self.matrix = {"representation": torch.stack(rows)}

    def build(self, layouts: dict[tuple[int, ...], SharedLayout]) -> None:
        """Do nothing: the matrix is there already."""

    def apply_direction(self, directions: dict[str, Tensor], head_weights: Sequence[float] | None = None) -> None:
        """Send a direction through the encoder, once."""
        sizes = [leaf.numel() for _, leaf in self.cuts]
        parts = directions["representation"].split(sizes)
        pairs = [(z, part.view_as(z)) for (z, _), part in zip(self.cuts, parts, strict=True) if z.requires_grad]
        torch.autograd.backward([z for z, _ in pairs], [part for _, part in pairs])
        for row, grads in enumerate(self._grads):
            for parameter, gradient in zip(self.parameters, grads, strict=True):
                if gradient is None:
                    continue
                own = gradient if head_weights is None else gradient * float(head_weights[row])
                parameter.grad = own if parameter.grad is None else parameter.grad + own
