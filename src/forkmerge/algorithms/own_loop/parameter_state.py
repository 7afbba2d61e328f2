"""The state of a fork by parameter, in which torch's distributed checkpoint spreads it over any number of ranks."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forkmerge.algorithms.own_loop.copy_training import copy_optimizer
from forkmerge.engine.storage.json_codec import pack, unpack
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.shards import is_sharded, local_of, sharded_like
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError

PLAIN = "plain"  # everything that is no tensor, as one JSON text
_KEPT = ("step", "groups", "scheduler", "scaler", "method")  # of a state, and no tensors of parameters


class OptimizerSlots:
    """What an optimizer keeps of every parameter once it has stepped.

    A checkpoint is read into tensors that are there already, so a fork that was never trained must have room for all
    of it: where a state has no such tensor, zeros take its place and are noted as absent.

    Args:
        binding: The module and its optimizer.
    """

    def __init__(self, binding: ModelBinding) -> None:
        self._binding = binding
        self._slots: dict[int, dict[str, Tensor]] | None = None

    def of(self, state: State) -> dict[int, dict[str, Any]]:
        """Return the optimizer's entries of a state, by parameter position."""
        layout = self._binding.layout
        entries: dict[int, dict[str, Any]] = {index: dict(entry) for index, entry in state.optimizer_loose.items()}
        for name, indices in state.optimizer_slots.items():
            for index in indices:
                view = layout.slices[index].view(state.optimizer_rows[name])
                entries.setdefault(index, {})[name.split("/", 1)[0]] = sharded_like(view, layout.parameters[index])
        return entries

    def missing(self, entries: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Tensor]]:
        """Return zeros for what a step would add to entries."""
        parameters = range(len(self._binding.layout.parameters))
        if self._slots is None and all(entries.get(index) for index in parameters):
            return {}
        if self._slots is None:
            self._slots = _slots_after_step(self._binding)
        return {
            index: {key: slot for key, slot in slots.items() if key not in entries.get(index, {})}
            for index, slots in self._slots.items()
        }


def tensors_by_parameter(
    binding: ModelBinding, state: State, slots: OptimizerSlots | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return copies of a state's tensors by parameter, and the rest of it."""
    layout = binding.layout
    weights = {
        row_slice.name: sharded_like(row_slice.view(state.rows[row_slice.row]).clone(), parameter)
        for row_slice, parameter in zip(layout.slices, layout.parameters, strict=True)
    }
    buffers = {name: binding.buffer(state, name).clone() for name in binding.own_buffers}
    tensors: dict[str, Any] = {"weights": weights, "buffers": buffers}
    if slots is None:
        return tensors, {"step": state.step}
    entries = slots.of(state)
    missing = slots.missing(entries)
    names = [row_slice.name for row_slice in layout.slices]
    tensors["optimizer"] = {
        names[index]: {
            key: value.clone()
            for key, value in {**entries.get(index, {}), **missing.get(index, {})}.items()
            if isinstance(value, Tensor)
        }
        for index in sorted({*entries, *missing})
    }
    present = {
        names[index]: [key for key in entry if isinstance(entry[key], Tensor)] for index, entry in entries.items()
    }
    plain = {
        names[index]: {key: value for key, value in entry.items() if not isinstance(value, Tensor)}
        for index, entry in entries.items()
    }
    kept = {key: getattr(state, key) for key in _KEPT}
    return tensors, {**kept, "present": present, "optimizer": plain}


def state_by_parameter(binding: ModelBinding, tensors: Mapping[str, Any], rest: Mapping[str, Any]) -> State:
    """Return the state that `tensors_by_parameter` described; it is attached to the module."""
    layout = binding.layout
    state = State(step=rest["step"], rows={})
    for row_slice, parameter in zip(layout.slices, layout.parameters, strict=True):
        value = _checked(row_slice.name, tensors["weights"].get(row_slice.name), parameter)
        if row_slice.row not in state.rows:
            state.rows[row_slice.row] = layout.new_row(row_slice.row, parameter.dtype, local_of(parameter))
        row_slice.view(state.rows[row_slice.row]).copy_(local_of(value))
    state.buffers = {name: value.clone() for name, value in tensors.get("buffers", {}).items()}
    if "present" not in rest:
        return state
    for index, row_slice in enumerate(layout.slices):
        if row_slice.name in rest["present"]:
            stored, present = tensors["optimizer"].get(row_slice.name, {}), rest["present"][row_slice.name]
            if unknown := [key for key in present if key not in stored]:
                raise ProblemError(
                    f"the state has {unknown[0]!r} of an optimizer for parameter {row_slice.name!r}, for which there "
                    "was no room: make the fork with the optimizer that it was saved with."
                )
            state.optimizer_loose[index] = {
                **{key: stored[key].clone() for key in present},
                **rest["optimizer"][row_slice.name],
            }
    for key in _KEPT:
        setattr(state, key, copy.deepcopy(rest[key]))
    binding.attach(binding.place(state))
    binding.capture(state)  # takes the optimizer's tensors into rows
    return state


def packed(value: Any) -> str:
    """Return plain data as one text; small tensors in it, such as a learning rate, are written as numbers."""
    data, tensors = pack(value)
    return json.dumps(
        [data, {name: [str(t.dtype), list(t.shape), t.flatten().tolist()] for name, t in tensors.items()}]
    )


def unpacked(text: str) -> Any:
    """Return what `packed` made a text of."""
    data, stored = json.loads(text)
    tensors = {
        name: torch.tensor(values, dtype=getattr(torch, dtype.removeprefix("torch."))).reshape(shape)
        for name, (dtype, shape, values) in stored.items()
    }
    return unpack(data, tensors)


def _slots_after_step(binding: ModelBinding) -> dict[int, dict[str, Tensor]]:
    """Return zeros in the form of what a first step leaves in the optimizer; nothing where it cannot be tried."""
    stand_ins = [nn.Parameter(torch.zeros_like(parameter)) for parameter in binding.layout.parameters]
    memo: dict[int, Any] = {id(p): q for p, q in zip(binding.layout.parameters, stand_ins, strict=True)}
    # Without its state, which may be large.
    memo[id(binding.optimizer.state)] = defaultdict(dict)
    trial = copy_optimizer(binding.optimizer, memo)
    for stand_in in stand_ins:
        stand_in.grad = torch.zeros_like(stand_in)
    try:
        trial.step()
    except Exception:  # one that needs a closure, or gradients that are not zero: then it has what it has
        return {}
    return {
        index: {key: torch.zeros_like(value) for key, value in trial.state[q].items() if isinstance(value, Tensor)}
        for index, q in enumerate(stand_ins)
        if q in trial.state
    }


def _checked(name: str, value: Any, parameter: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        shape = list(value.shape) if isinstance(value, Tensor) else "missing"
        raise ProblemError(
            f"the state is that of another model: parameter {name!r} is {shape} in it and {list(parameter.shape)} in "
            "this fork."
        )
    if local_of(value).shape != local_of(parameter).shape or is_sharded(value) != is_sharded(parameter):
        raise ProblemError(
            f"parameter {name!r} is spread over the ranks in another way than in this fork: read the checkpoint by "
            "torch.distributed.checkpoint.load, which spreads it anew."
        )
    return value
