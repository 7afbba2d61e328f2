"""Copies of everything a training loop holds: every branch of a fork is trained in one of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType
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
from forkmerge.errors import ProblemError


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
    _check_forwards(module, model)
    own_optimizer = copy_optimizer(optimizer, memo)
    own_scheduler = copy.deepcopy(scheduler, memo)
    if own_scheduler is not None:
        _let_schedulers_see_steps(own_optimizer)
    return module, own_optimizer, own_scheduler, copy.deepcopy(scaler, memo)


def copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer without its hooks; `memo` has what stands in for its parameters, by their ids."""
    own_optimizer = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        # torch's own copy keeps only defaults, state and groups; some optimizers (LBFGS) hold more.
        if name not in vars(own_optimizer) and not callable(value):
            setattr(own_optimizer, name, copy.deepcopy(value, memo))
    return own_optimizer


def _let_schedulers_see_steps(optimizer: Optimizer) -> None:
    """Mark steps as a scheduler's constructor does: a copied optimizer has lost the mark, and torch would warn."""
    plain = type(optimizer).step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return plain(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


def _check_forwards(copied: nn.Module, original: nn.Module) -> None:
    """Refuse a `forward` that was replaced by a function with the original in it: its copy would call the original."""
    modules = {id(module) for module in original.modules()}
    for name, module in copied.named_modules():
        if "forward" in vars(module) and _holds(vars(module)["forward"], modules):
            path = f"model.{name}.forward" if name else "model.forward"
            raise ProblemError(
                f"{path} was replaced by a function that holds the model itself, as trl's trainers and others do: a "
                f"copy of the model would call the original, and be scored by its weights. Put the method of its class "
                f"back with `del {path}`, or fork a model that no trainer has had."
            )


def _holds(value: Any, modules: set[int]) -> bool:
    """Say whether a function leads to one of these modules; copying a function does not copy what it closes over."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if id(each) in modules:
            return True
        if id(each) in seen:  # a function may close over itself
            continue
        seen.add(id(each))
        if isinstance(each, MethodType):
            waiting += [each.__self__, each.__func__]
        elif isinstance(each, functools.partial):
            waiting += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, FunctionType):
            waiting += [cell.cell_contents for cell in each.__closure__ or ()]
    return False
