"""The whole state of a torch module that was not written with checkpoints in mind, as plain data.

Parameters, buffers, plain attributes of every submodule, and optimizers they own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_INTERNAL = frozenset(vars(nn.Module()))  # hooks, the dictionaries of parameters, buffers and submodules, training
_PLAIN = (bool, int, float, str, Tensor, torch.dtype, torch.device)


def export_state(module: nn.Module) -> dict[str, Any]:
    """Return the state of a module and its submodules; its buffers and attributes are shared, not copied."""
    result = {}
    for path, part in module.named_modules():
        attributes = {key: value for key, value in vars(part).items() if key not in _INTERNAL and is_plain(value)}
        result[path] = {
            "parameters": {key: p.detach().clone() for key, p in part._parameters.items() if p is not None},
            "buffers": dict(part._buffers),
            "attributes": attributes,
            "optimizers": {k: _export(v, part) for k, v in vars(part).items() if isinstance(v, Optimizer)},
        }
    return result


def import_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Give a module the state that `export_state` returned."""
    for path, part in module.named_modules():
        saved = state[path]
        with torch.no_grad():
            for key, value in saved["parameters"].items():
                part._parameters[key].copy_(value)
        part._buffers.update(saved["buffers"])
        vars(part).update(saved["attributes"])
        for key, value in saved["optimizers"].items():
            vars(part)[key] = _import(value, part)


def opaque_attributes(part: nn.Module) -> list[str]:
    """The names of attributes that `export_state` leaves out, functions and submodules aside."""
    return [
        key
        for key, value in vars(part).items()
        if key not in _INTERNAL and not is_plain(value) and not isinstance(value, Optimizer) and not callable(value)
    ]


def is_plain(value: Any) -> bool:
    """Whether a value is data: numbers, text, tensors, and lists, tuples and dicts of them."""
    if value is None or isinstance(value, _PLAIN):
        return True
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return isinstance(value, list | tuple) and all(is_plain(item) for item in value)


def _export(optimizer: Optimizer, part: nn.Module) -> dict[str, Any]:
    names = {id(parameter): key for key, parameter in part._parameters.items()}
    owned = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    return {"kind": type(optimizer).__name__, "parameters": owned, "state": optimizer.state_dict()}


def _import(saved: dict[str, Any], part: nn.Module) -> Optimizer:
    optimizer: Optimizer = getattr(torch.optim, saved["kind"])([part._parameters[key] for key in saved["parameters"]])
    optimizer.load_state_dict(saved["state"])
    return optimizer
