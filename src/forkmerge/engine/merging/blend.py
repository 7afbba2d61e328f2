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
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError

Refresh = Callable[[State], None]
"""Brings a combination's BatchNorm statistics up to date, in place."""


def blend_weights(
    binding: ModelBinding, states: Sequence[State], coefficients: Coefficients, out: State, origin: State | None = None
) -> State:
    """Write θ_r + Σ_{k≠r} Λ_k (θ_k − θ_r) into `out`; a single branch is returned itself, bit for bit.

    Coefficients that do not sum to 1 are those of updates: θ_0 + Σ_k Λ_k (θ_k − θ_0), θ_0 the fork point `origin`.
    Floating buffers (BN statistics among them) are combined like parameters, with coefficients that are normalised:
    statistics are no updates. Integer ones, and those whose shape differs between branches, come from the heaviest
    branch.
    """
    if is_vertex(coefficients):
        return states[coefficients.index(1.0)]
    blend_rows(states, coefficients, out, origin)
    out.buffers = {}
    used = [(state, share) for state, share in zip(states, normalised(coefficients), strict=True) if share != 0]
    shares = [share for _, share in used]
    for name in {name: None for state, _ in used for name in state.buffers}:
        values = [binding.buffer(state, name) for state, _ in used]
        top = values[heaviest(shares)]
        same = all(value.shape == top.shape and value.dtype == top.dtype for value in values)
        out.buffers[name] = merge_tensors(values, shares) if same else top.clone()
    out.step = states[0].step
    return out


def blend_rows(states: Sequence[State], coefficients: Coefficients, out: State, origin: State | None = None) -> None:
    """Write the merged parameters into `out`."""
    rest = rest_of(coefficients)
    if rest == 0:
        for name, row in out.rows.items():
            merge_into(row, [state.rows[name] for state in states], coefficients)
        return
    if origin is None:
        raise ProblemError(f"coefficients that sum to {1 - rest:.7g} need the common fork point of the branches.")
    for name, row in out.rows.items():
        rows = [state.rows[name] for state in (*states, origin)]
        merge_into(row, rows, (*coefficients, rest), signed=True)


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
    """

    def __init__(
        self,
        binding: ModelBinding,
        states: Sequence[State],
        out: State,
        refresh: Refresh | None = None,
        origin: State | None = None,
    ) -> None:
        self.binding, self.states, self.out, self.refresh = binding, states, out, refresh
        self.origin = origin
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
            blend_rows(self.states, coefficients, self.out, self.origin)
            self.out.buffers = dict(self._buffers[coefficients])
        else:
            blend_weights(self.binding, self.states, coefficients, self.out, self.origin)
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
