"""Which device a worker trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from forkmerge.errors import ProblemError

Devices = Sequence[str | torch.device]
_own_index = 0


def own_index() -> int:
    """Return the position of this process among those that do independent calls; 0 where it is none of them."""
    return _own_index


def set_own_index(index: int) -> None:
    """Give this process its position, for good."""
    global _own_index
    _own_index = index


def resolve_workers(workers: int | None, devices: Devices | None) -> int:
    """Return the number of processes: as many as there are devices, unless it is given."""
    return workers or len(check_devices(devices)) or 1


def check_devices(devices: Devices | None) -> tuple[torch.device, ...]:
    """Return devices that can be used, all of one kind, or refuse them by name; none at all for None."""
    if devices is None:
        return ()
    if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence) or not devices:
        raise ProblemError(f"devices must be a list such as ['cuda:0', 'cuda:1'], got {devices!r}.")
    usable = tuple(_device(name) for name in devices)
    kinds = list(dict.fromkeys(device.type for device in usable))
    if len(kinds) > 1:
        raise ProblemError(
            f"devices must be of one kind, because the bits of a run depend on it: got {' and '.join(kinds)}."
        )
    return usable


def on_own_device(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a whole run in this process: worker i of several has device i modulo their number."""
    devices = options.get("devices")
    return {**options, "devices": [devices[own_index() % len(devices)]]} if devices else dict(options)


def place_model(model: nn.Module, devices: Sequence[torch.device]) -> None:
    """Move a model to the first device, where merges are made and measured."""
    if not devices:
        return
    used = {parameter.device for parameter in model.parameters()}
    if len(used) > 1:
        names = ", ".join(sorted(map(str, used)))
        raise ProblemError(
            f"the model lies on several devices ({names}): devices=… puts a whole model on each. Drop it."
        )
    model.to(devices[0])


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        why = (str(error).strip().splitlines() or ["unknown"])[0].rstrip(".")
        raise ProblemError(f"device {str(name)!r} cannot be used: {why}. Name one that this machine has.") from None
    return device
