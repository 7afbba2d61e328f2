"""Which parameters the tasks of a branch share, and where their gradients lie in the matrix of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forkmerge.engine.training.state import Layout


@dataclass
class GradientLayout:
    """Which parameters each task of a step reaches, and the memory for the shared ones; the same for most steps."""

    reached: list[tuple[bool, ...]]
    shared: SharedLayout


class GradientLayouts:
    """Gradient layouts of earlier steps by their tasks, and what all steps have shown to be shared.

    A parameter that two tasks of one step reached stays shared in steps where only one of them has a label.

    Args:
        shared: Positions of the shared parameters known so far, ascending; extended in place.
    """

    def __init__(self, shared: list[int]) -> None:
        self.shared = shared
        self._layouts: dict[tuple[str, ...], GradientLayout] = {}

    def get(self, tasks: Sequence[str]) -> GradientLayout | None:
        """Return the layout of the last step with these tasks, unless more parameters are shared by now."""
        layout = self._layouts.get(tuple(tasks))
        return layout if layout is not None and layout.shared.positions == self.shared else None

    def make(
        self, tasks: Sequence[str], reached: list[tuple[bool, ...]], parameters: Sequence[nn.Parameter]
    ) -> GradientLayout:
        """Return, and keep, the layout for tasks that reach these parameters."""
        counts = [sum(column) for column in zip(*reached, strict=True)]
        before = set(self.shared)
        self.shared[:] = [i for i, count in enumerate(counts) if count > 1 or i in before]
        layout = self._layouts[tuple(tasks)] = GradientLayout(reached, SharedLayout(parameters, list(self.shared)))
        return layout


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
            pairs = zip(self.layout.slices, self.parameters, strict=True)
            firsts = {row_slice.row: parameter for row_slice, parameter in reversed(list(pairs))}
            blocks = {
                row: torch.zeros(tasks, size, dtype=firsts[row].dtype, device=firsts[row].device)
                for row, size in self.layout.sizes.items()
            }
            self._blocks[tasks] = blocks
            self._views[tasks] = [
                [row_slice.view(blocks[row_slice.row][k]) for row_slice in self.layout.slices] for k in range(tasks)
            ]
        return self._blocks[tasks]

    def views(self, row: int, tasks: int) -> list[Tensor]:
        """Return one task's row as tensors of the parameters' shapes."""
        return self._views[tasks][row]

    def write(self, row: int, tasks: int, gradients: Sequence[Tensor | None]) -> None:
        """Write one task's gradients, given for all parameters, into its row; what it does not reach is zero."""
        pairs = list(zip(self.views(row, tasks), (gradients[i] for i in self.positions), strict=True))
        zeros = [view for view, gradient in pairs if gradient is None]
        if zeros:
            torch._foreach_zero_(zeros)
        views = [view for view, gradient in pairs if gradient is not None]
        if views:
            torch._foreach_copy_(views, [dense(gradient) for _, gradient in pairs if gradient is not None])

    def flatten(self, values: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Return values, given for all parameters, as vectors in the order of the matrix's columns."""
        vectors = {
            row_slice.row: self.layout.new_row(row_slice.row, parameter.dtype, parameter)
            for row_slice, parameter in zip(self.layout.slices, self.parameters, strict=True)
        }
        for row_slice, i in zip(self.layout.slices, self.positions, strict=True):
            value = values[i]
            if value is not None:
                row_slice.view(vectors[row_slice.row]).copy_(dense(value))
        return vectors

    def assign(self, directions: dict[str, Tensor]) -> None:
        """Let the parameters' gradients be views of the direction."""
        for row_slice, parameter in zip(self.layout.slices, self.parameters, strict=True):
            parameter.grad = row_slice.view(directions[row_slice.row])


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as an ordinary tensor."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def total_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return a number that is finite if all entries are: their sum, the fastest pass over memory there is."""
    parts = [
        # Half precision would overflow where its entries do not.
        torch.sum(g._values() if g.is_sparse else g, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    ]
    if not parts:
        return torch.zeros(())
    return parts[0] if len(parts) == 1 else torch.stack([part.to(parts[0].device) for part in parts]).sum()
