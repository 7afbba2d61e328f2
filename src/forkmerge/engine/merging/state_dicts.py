"""Merges of plain state dicts, without forking anything."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor

from forkmerge.engine.merging.arithmetic import merge_tensors
from forkmerge.errors import ProblemError


def _described(value: object) -> str:
    return "none" if isinstance(value, Mapping) and not value else type(value).__name__


def merge_states(states: Mapping[str, Mapping[str, Tensor]], coefficients: Mapping[str, float]) -> dict[str, Tensor]:
    """Merge plain state dicts, `{branch: model.state_dict()}`, without forking anything.

    Example:
        >>> import torch, forkmerge as fm
        >>> a, b = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> fm.merge_states({"a": a, "b": b}, {"a": 0.75, "b": 0.25})["w"].item()
        0.25
    """
    if not isinstance(states, Mapping) or not isinstance(coefficients, Mapping) or not states:
        raise ProblemError(
            "merge_states takes {branch: model.state_dict()} and {branch: coefficient}, "
            f"got {_described(states)} and {_described(coefficients)}."
        )
    for name, state in states.items():
        if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
            kind = type(state).__name__
            raise ProblemError(
                f"the state of branch {name!r} must be a model's state_dict(), tensors by name, got {kind}."
            )
    names = list(states)
    if set(names) != set(coefficients):
        raise ProblemError(f"coefficients are for {sorted(coefficients)}, but the states are {sorted(names)}.")
    for one, other in pairwise(names):
        for key in (*states[one], *states[other]):
            shapes = [tuple(states[n][key].shape) if key in states[n] else "missing" for n in (one, other)]
            if shapes[0] != shapes[1]:
                raise ProblemError(
                    f"branches {one!r} and {other!r} have different parameters: {key!r} is {shapes[0]} in one "
                    f"and {shapes[1]} in the other."
                )
    values = [coefficients[name] for name in names]
    return {key: merge_tensors([states[name][key] for name in names], values) for key in states[names[0]]}
