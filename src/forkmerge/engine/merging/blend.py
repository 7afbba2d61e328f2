"""The state that coefficients give: candidates of a merge, built one at a time in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from forkmerge.engine.merging.arithmetic import (
    Coefficients,
    heaviest,
    is_vertex,
    merge_into,
    merge_tensors,
    normalised,
    rest_of,
)
from forkmerge.engine.merging.layer_groups import LayerGroups
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError

Refresh = Callable[[State], None]
"""Brings a combination's BatchNorm statistics up to date, in place."""


def blend_weights(
    binding: ModelBinding,
    states: Sequence[State],
    coefficients: Coefficients,
    out: State,
    origin: State | None = None,
    groups: LayerGroups | None = None,
) -> State:
    """Write θ_r + Σ_{k≠r} Λ_k (θ_k − θ_r) into `out`; a single branch is returned itself, bit for bit.

    Coefficients that do not sum to 1 are those of updates: θ_0 + Σ_k Λ_k (θ_k − θ_0), θ_0 the fork point `origin`.
    Floating buffers (BN statistics among them) are combined like parameters, with coefficients that are normalised:
    statistics are no updates. Integer ones, and those whose shape differs between branches, come from the heaviest
    branch. Coefficients by layer group (see `LayerGroups`) merge each group's parameters and buffers with its own.
    `out` may be one of the states.
    """
    if is_vertex(coefficients):
        return states[coefficients.index(1.0)]
    blend_rows(states, coefficients, out, origin, groups)
    whole = len(coefficients) == len(states) or groups is None
    parts = [coefficients] if whole or groups is None else groups.parts(coefficients)
    used = [state for state, *shares in zip(states, *parts, strict=True) if any(shares)]
    buffers: dict[str, Tensor] = {}
    for name in {name: None for state in used for name in state.buffers}:
        part = parts[0 if whole or groups is None else groups.group_of(name)]
        buffers[name] = _blend_buffer(binding, name, states, normalised(part))
    out.buffers, out.step = buffers, states[0].step
    return out


def _blend_buffer(binding: ModelBinding, name: str, states: Sequence[State], coefficients: Coefficients) -> Tensor:
    used = [(state, share) for state, share in zip(states, coefficients, strict=True) if share != 0]
    shares = [share for _, share in used]
    values = [binding.buffer(state, name) for state, _ in used]
    top = values[heaviest(shares)]
    same = all(value.shape == top.shape and value.dtype == top.dtype for value in values)
    return merge_tensors(values, shares) if same else top.clone()


def blend_rows(
    states: Sequence[State],
    coefficients: Coefficients,
    out: State,
    origin: State | None = None,
    groups: LayerGroups | None = None,
) -> None:
    """Write the merged parameters into `out`."""
    if groups is None or len(coefficients) == len(states):
        for name, row in out.rows.items():
            _blend_piece(row, name, slice(None), states, coefficients, origin)
        return
    parts = groups.parts(coefficients)
    for name, row in out.rows.items():
        for start, end, group in groups.pieces[name]:
            _blend_piece(row, name, slice(start, end), states, parts[group], origin)


def _blend_piece(
    row: Tensor, name: str, piece: slice, states: Sequence[State], coefficients: Coefficients, origin: State | None
) -> None:
    rest, rows = rest_of(coefficients), [state.rows[name][piece] for state in states]
    if rest == 0:
        merge_into(row[piece], rows, coefficients)
        return
    if origin is None:
        raise ProblemError(f"coefficients that sum to {1 - rest:.7g} need the common fork point of the branches.")
    merge_into(row[piece], [*rows, origin.rows[name][piece]], (*coefficients, rest), signed=True)


class Blender:
    """Builds the candidates of one merge, one at a time in the same memory, exactly as they would be installed.

    A candidate's buffers are kept, so that coming back to it costs the merged parameters only and no statistics are
    computed twice; asked for the candidate that is there already, it does nothing.

    Args:
        binding: Where the states' buffers are looked up, and candidates are attached to.
        states: The branches; they must not change while candidates are built.
        out: Takes the candidates; nobody else may write to it.
        refresh: Called on a new combination, e.g. to recompute BatchNorm statistics. A single branch is a trained
            model, not a mixture, and keeps its own.
        origin: The common fork point, for coefficients that do not sum to 1; another state than `out`.
        groups: The layer groups, for coefficients of each.
    """

    def __init__(
        self,
        binding: ModelBinding,
        states: Sequence[State],
        out: State,
        refresh: Refresh | None = None,
        origin: State | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        self.binding, self.states, self.out, self.refresh = binding, states, out, refresh
        self.origin, self.groups = origin, groups
        self._buffers: dict[Coefficients, dict[str, Tensor]] = {}
        self._is_finite: dict[Coefficients, bool] = {}
        self._built: Coefficients | None = None
        self._attached: Coefficients | None = None

    def __call__(self, coefficients: Coefficients) -> State:
        """Return the state of a candidate; a single branch is itself."""
        if is_vertex(coefficients):
            return self.states[coefficients.index(1.0)]
        if coefficients == self._built:
            return self.out
        self._built = self._attached = None  # until it is whole
        if coefficients in self._buffers:
            blend_rows(self.states, coefficients, self.out, self.origin, self.groups)
            self.out.buffers = dict(self._buffers[coefficients])
        else:
            blend_weights(self.binding, self.states, coefficients, self.out, self.origin, self.groups)
            if self.refresh is not None:
                self.refresh(self.out)
            self._buffers[coefficients] = dict(self.out.buffers)
        self._built = coefficients
        return self.out

    def model_of(self, coefficients: Coefficients) -> nn.Module | None:
        """Return the module with a candidate's weights; None if they are not finite.

        A candidate is attached once and trusted to stay so: while candidates are raced, nobody else may attach.
        """
        if coefficients != self._attached:
            state = self(coefficients)
            self.binding.attach_weights(state)
            self._attached = coefficients
            if coefficients not in self._is_finite:
                self._is_finite[coefficients] = state.is_finite()
        return self.binding.model if self._is_finite[coefficients] else None
