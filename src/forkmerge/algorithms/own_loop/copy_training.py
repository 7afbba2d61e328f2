"""Copies of everything a training loop holds."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def copy_training(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    scaler: torch.amp.GradScaler | None,
) -> tuple[nn.Module, Optimizer, LRScheduler | None, torch.amp.GradScaler | None]:
    """Copy a model with everything that refers to its parameters; frozen parameters are shared, not copied."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
    module = copy.deepcopy(model, memo)
    own_optimizer = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        # torch's own copy keeps only defaults, state and groups; some optimizers (LBFGS) hold more.
        if name not in vars(own_optimizer) and not callable(value):
            setattr(own_optimizer, name, copy.deepcopy(value, memo))
    own_scheduler = copy.deepcopy(scheduler, memo)
    if own_scheduler is not None:
        _let_schedulers_see_steps(own_optimizer)
    return module, own_optimizer, own_scheduler, copy.deepcopy(scaler, memo)


def _let_schedulers_see_steps(optimizer: Optimizer) -> None:
    """Mark steps as a scheduler's constructor does: a copied optimizer has lost the mark, and torch would warn."""
    plain = type(optimizer).step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return plain(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
