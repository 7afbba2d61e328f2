"""What of a model is on this rank: local shards of its tensors, and its names without wrappers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forkmerge.errors import ProblemError

_COMPILED = "_orig_mod"  # under which `torch.compile` holds the module


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is spread over ranks."""
    return type(tensor).__name__ == "DTensor"  # by name: importing the class takes longer than the rest of a fork


def local_of(tensor: Tensor) -> Tensor:
    """Return what of a tensor is on this rank, sharing its memory: itself unless it is sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def sharded_like(local: Tensor, tensor: Any) -> Tensor:
    """Return the tensor of which `local` is this rank's part, sharing its memory: spread as another one is."""
    if not is_sharded(tensor):
        return local
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Return what changes whenever the tensor is written to: a sharded one may be, as a whole or on this rank."""
    return tensor._version, local_of(tensor)._version


def reshard(model: nn.Module) -> None:
    """Let FSDP2 give up the whole weights that it has gathered.

    After a forward pass without a backward one it keeps those of the root module, and would go on computing with them
    whatever is written into the shards.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def check_reduced(model: nn.Module, branch: str) -> None:
    """Refuse gradients that FSDP2 holds back, which would be added to those of the next branch."""
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
            whole = getattr(parameter, "_unsharded_param", None)
            if parameter.unsharded_accumulated_grad is not None or getattr(whole, "grad", None) is not None:
                raise ProblemError(
                    f"branch {branch!r} ends its turn with gradients that were not reduced over the ranks "
                    "(set_requires_gradient_sync(False)): take the last backward pass of a turn with True."
                )


def spans_ranks(model: nn.Module) -> bool:
    """Whether a model is trained by several ranks together: DDP, FSDP2, or any sharded parameters."""
    is_parallel = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    return is_parallel or any(map(is_sharded, model.parameters())) or bool(_fsdp_modules(model))


def wrapper_prefix(model: nn.Module) -> str:
    """Return what DDP and `torch.compile` around a model put before the names of its tensors."""
    if _COMPILED in model._modules:
        return f"{_COMPILED}." + wrapper_prefix(model.get_submodule(_COMPILED))
    if isinstance(model, DistributedDataParallel):
        return "module." + wrapper_prefix(model.module)
    return ""


def plain_name(name: str, prefix: str) -> str:
    """Return the name that a tensor has in the model without wrappers."""
    return name.removeprefix(prefix).replace(f"{_COMPILED}.", "")


def _fsdp_modules(model: nn.Module) -> list[Any]:
    if "torch.distributed.fsdp" not in sys.modules:  # where it was never imported nothing is sharded by it
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
