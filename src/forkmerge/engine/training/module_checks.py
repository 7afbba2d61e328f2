"""Modules that cannot be forked or trained in rows, refused with what to pass instead."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import UninitializedParameter

from forkmerge.engine.training.shards import is_sharded, spans_ranks
from forkmerge.errors import ProblemError


def check_module(model: nn.Module, *, may_span: bool = False) -> None:
    """Refuse modules whose parameters cannot be moved into rows, saying what to pass instead.

    Args:
        model: The module.
        may_span: Whether it may be one that several ranks train together.
    """
    if not isinstance(model, nn.Module):
        raise ProblemError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, nn.DataParallel):
        raise ProblemError("the model is wrapped in DataParallel: pass the module inside it, model.module.")
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ProblemError(
                "the model is wrapped in FullyShardedDataParallel, whose parameters are flattened: shard the plain "
                "module by torch.distributed.fsdp.fully_shard, and fm.fork(…, in_place=True)."
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ProblemError(
                f"the module {name or type(module).__name__!r} keeps extra state (get_extra_state), which cannot be "
                "merged or saved without pickle: hold it in buffers instead."
            )
    if not may_span and spans_ranks(model):
        raise ProblemError(
            "the model spans ranks (DDP or FSDP): pass the plain module, or train it in your own loop with "
            "fm.fork(…, in_place=True)."
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter) or type(tensor).__name__ == "UninitializedBuffer":
            raise ProblemError(f"{name!r} is lazy and has no shape yet: run the model on one batch before passing it.")
        if is_sharded(tensor) and not isinstance(tensor, nn.Parameter):
            raise ProblemError(f"the buffer {name!r} is sharded, and only parameters may be: replicate it.")
