"""Copies of everything a training loop holds: every branch of a fork is trained in one of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from forkmerge.algorithms.own_loop.forked_branch import BranchModels, ForkedBranch
from forkmerge.algorithms.own_loop.paired_loader import PairedPasses
from forkmerge.engine.training.learning_rates import ScaledSteps
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.state import Layout, State, check_same_parameters


class CopiedModels(BranchModels):
    """A copy of the module, optimizer, scheduler and scaler for every branch: any may be trained at any time."""

    def each(self) -> Iterator[ForkedBranch]:
        """Yield every branch."""
        return iter(list(self.branches))

    def gather(self) -> list[State]:
        """Bring every branch's state up to date with its model and optimizer, and return them."""
        signatures = [Layout(branch.model).signature for branch in self.branches]
        fork_point = self.branches[0]._binding.layout.signature
        check_same_parameters([fork_point, *signatures], ["the fork", *(branch.name for branch in self.branches)])
        for branch in self.branches:
            branch._binding.resync(branch._state)
            branch._binding.capture(branch._state)
        return [branch._state for branch in self.branches]

    def attach(self, merged: State) -> None:
        """Let every model and optimizer show its branch's state."""
        for branch in self.branches:
            branch._binding.attach(branch._state)

    def check_free(self, action: str) -> None:
        """Refuse nothing: no branch stands in the way of another."""


def copied_models(
    mixtures: Sequence[Mixture],
    passes: Sequence[PairedPasses],
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    scaler: torch.amp.GradScaler | None,
) -> CopiedModels:
    """Return branches that are trained in copies of everything."""
    branches = []
    for mixture, own_passes in zip(mixtures, passes, strict=True):
        module, own_optimizer, own_scheduler, own_scaler = copy_training(model, optimizer, scheduler, scaler)
        binding = ModelBinding(module, own_optimizer, own_scheduler, own_scaler)
        branches.append(ForkedBranch(mixture, binding, own_scaler, own_passes, binding.initial()))
        own_optimizer.register_step_post_hook(branches[-1]._count_step)
        ScaledSteps(own_optimizer, mixture.lr_scale)
    return CopiedModels(branches)


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
