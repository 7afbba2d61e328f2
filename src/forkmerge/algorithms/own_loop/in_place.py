"""One module and optimizer that the branches of a fork have in turn, for trainers that own the module."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from forkmerge.algorithms.own_loop.forked_branch import BranchModels, ForkedBranch
from forkmerge.algorithms.own_loop.paired_loader import PairedPasses
from forkmerge.engine.training.learning_rates import multiply_rates, restore_rates
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.shards import check_reduced, local_of, spans_ranks, version_of
from forkmerge.engine.training.state import Layout, State, check_same_parameters
from forkmerge.errors import ProblemError

_LENT = ("model", "optimizer", "scheduler", "scaler")
_STEPPED = "_version_at_forkmerge_step"  # on a gradient: its version when the optimizer last stepped with it


class LentBranch(ForkedBranch):
    """A branch that has `model`, `optimizer`, `scheduler` and `scaler` only while it is its turn."""

    def __init__(
        self,
        mixture: Mixture,
        binding: ModelBinding,
        scaler: torch.amp.GradScaler | None,
        passes: PairedPasses,
        state: State,
    ) -> None:
        super().__init__(mixture, binding, scaler, passes, state)
        self._lent = {name: vars(self).pop(name) for name in _LENT}
        self._gradients: list[Tensor | None] | None = None  # those that the optimizer has not stepped with yet

    def __getattr__(self, name: str) -> Any:
        if name in _LENT:
            raise ProblemError(
                f"branch {self.name!r} does not have the {name} now: in place, branches have it one at a time, inside "
                "`for branch in forked`. To hold several at once, fork without in_place."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _take(self) -> None:
        vars(self).update(self._lent)

    def _hand_back(self) -> None:
        for name in _LENT:
            vars(self).pop(name, None)


class LentModel(BranchModels):
    """One module, optimizer, scheduler and scaler, lent to the branches in turn; outside it shows the last merge.

    Gradients that the optimizer has not stepped with stay with their branch; others are dropped when it hands the
    module back, so that one gradient is held, not one per branch.

    Args:
        branches: The branches, all of one binding, whose module is lent.
    """

    def __init__(self, branches: Sequence[LentBranch]) -> None:
        super().__init__(branches)
        self._branches = list(branches)
        self._binding = branches[0]._binding
        self._parameters = self._binding.layout.parameters
        self._spans_ranks = spans_ranks(self._binding.model)
        self._holder: LentBranch | None = None
        self._rates: list[Any] | None = None  # before a branch's lr_scale multiplied them
        self._binding.optimizer.register_step_pre_hook(self._before_step)
        self._binding.optimizer.register_step_post_hook(self._after_step)

    def each(self) -> Iterator[ForkedBranch]:
        """Lend the module to every branch in turn."""
        self.check_free("a second loop over the fork")
        self._check_untouched()
        try:
            for branch in self._branches:
                self._take_back()
                self._lend(branch)
                yield branch
        finally:
            self._take_back()
            self._show()

    def gather(self) -> list[State]:
        """Bring the states up to date: that of the branch which has the module, and the groups of all."""
        fork_point = self._binding.layout.signature
        check_same_parameters([fork_point, Layout(self._binding.model).signature], ["the fork", "the module"])
        if self._holder is None:
            self._check_untouched()
        else:
            self._capture(self._holder)
        return [branch._state for branch in self.branches]

    def attach(self, merged: State) -> None:
        """Let the module show the last merge, and the optimizer the state of the first branch."""
        self._merged = merged
        self._show()

    def check_free(self, action: str) -> None:
        """Refuse what needs the module while a branch has it."""
        if self._holder is not None:
            raise ProblemError(
                f"branch {self._holder.name!r} has the module: {action} has to wait until `for branch in forked` has "
                "ended. To hold several branches at once, fork without in_place."
            )

    def _lend(self, branch: LentBranch) -> None:
        self._binding.attach(branch._state)
        increment_version(self._parameters)  # torch then refuses a backward pass through the turn of another branch
        for parameter, gradient in zip(self._parameters, branch._gradients or (), strict=False):
            parameter.grad = gradient
        branch._gradients = None
        branch._take()
        self._holder = branch

    def _take_back(self) -> None:
        branch = self._holder
        if branch is None:
            return
        check_reduced(self._binding.model, branch.name)
        self._capture(branch)
        if any(_is_fresh(parameter.grad) for parameter in self._parameters):
            branch._gradients = [self._kept(parameter.grad) for parameter in self._parameters]
        self._drop_gradients()
        branch._hand_back()
        self._holder = None

    def _capture(self, branch: LentBranch) -> None:
        self._restore_rates()
        self._binding.resync(branch._state)
        self._binding.capture(branch._state)

    def _show(self) -> None:
        binding = self._binding
        binding.attach_optimizer(self.branches[0]._state)
        binding.attach_weights(self._merged)
        increment_version(self._parameters)
        self._drop_gradients()
        self._shown_weights = [(local_of(p).data_ptr(), version_of(p)) for p in self._parameters]
        self._shown_groups = self._groups()
        self._shown_epoch = getattr(binding.scheduler, "last_epoch", None)

    def _check_untouched(self) -> None:
        """Give what was changed in the optimizer's groups to all branches, and refuse any other change."""
        binding = self._binding
        for row_slice, parameter, shown in zip(
            binding.layout.slices, self._parameters, self._shown_weights, strict=True
        ):
            view, local = row_slice.view(self._merged.rows[row_slice.row]), local_of(parameter)
            is_elsewhere = local.data_ptr() != shown[0]  # moved, or given other memory
            if not torch.equal(local.to(view.device), view) if is_elsewhere else version_of(parameter) != shown[1]:
                raise ProblemError(
                    f"parameter {row_slice.name!r} was changed while no branch had the module, which then shows the "
                    "last merge: train inside `for branch in forked`, or fork the changed model anew."
                )
            if parameter.grad is not None:
                raise ProblemError(
                    f"parameter {row_slice.name!r} got a gradient while no branch had the module: call backward inside "
                    "`for branch in forked`, where the loss was computed."
                )
        if getattr(binding.scheduler, "last_epoch", None) != self._shown_epoch:
            raise ProblemError(
                "the scheduler was stepped while no branch had the module: step branch.scheduler inside `for branch in "
                "forked`; one that is stepped once for all branches is not passed to fork."
            )
        for index, (group, shown_group) in enumerate(zip(self._groups(), self._shown_groups, strict=True)):
            changes = {k: v for k, v in group.items() if k not in shown_group or not _equal(v, shown_group[k])}
            for branch in self.branches:
                branch._state.groups[index].update(copy.deepcopy(changes))
        self._shown_groups = self._groups()

    def _groups(self) -> list[dict[str, Any]]:
        groups = self._binding.optimizer.param_groups
        return [{key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in groups]

    def _kept(self, gradient: Tensor | None) -> Tensor | None:
        """Return a gradient to keep for a branch: DDP may write the next one's into the same memory."""
        return gradient.clone() if gradient is not None and self._spans_ranks else gradient

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _before_step(self, *_: Any) -> None:
        if self._holder is None:
            raise ProblemError(
                "the optimizer was stepped while no branch had the module: train inside `for branch in forked`. Once "
                "you have merged for the last time, go on with a new optimizer of the module."
            )
        self._restore_rates()
        if self._holder.lr_scale != 1:
            self._rates = multiply_rates(self._binding.optimizer, self._holder.lr_scale)

    def _after_step(self, *_: Any) -> None:
        assert self._holder is not None
        self._restore_rates()
        self._holder._count_step()
        for parameter in self._parameters:
            if parameter.grad is not None:
                setattr(parameter.grad, _STEPPED, version_of(parameter.grad))

    def _restore_rates(self) -> None:
        if self._rates is not None:
            restore_rates(self._binding.optimizer, self._rates)
        self._rates = None


def lent_models(
    mixtures: Sequence[Mixture],
    passes: Sequence[PairedPasses],
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    scaler: torch.amp.GradScaler | None,
) -> LentModel:
    """Return branches that are trained in turn in what is given."""
    binding = ModelBinding(model, optimizer, scheduler, scaler)
    state = binding.initial()
    states = [state, *(state.clone() for _ in mixtures[1:])]
    return LentModel(
        [
            LentBranch(mixture, binding, scaler, own_passes, own_state)
            for mixture, own_passes, own_state in zip(mixtures, passes, states, strict=True)
        ]
    )


def _is_fresh(gradient: Tensor | None) -> bool:
    """Whether something was added to a gradient since the optimizer last stepped with it."""
    return gradient is not None and getattr(gradient, _STEPPED, None) != version_of(gradient)


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    return bool(value == other)
