"""One branch of a fork, and the module that it is trained in: one of its own, or one that all have in turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from forkmerge.algorithms.own_loop.paired_loader import PairedPasses
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.state import State


class ForkedBranch:
    """One branch of a fork: train `model` with `optimizer` as you always do.

    Attributes:
        name: The branch's name.
        task_weights: ν: what to multiply each task's loss with.
        lr_scale: Factor on the learning rates, which the optimizer's steps apply by themselves.
        model: An independent copy of the model; frozen parameters are shared by all branches. In place it is the model
            that was forked, while the branch has it.
        optimizer: Its own optimizer.
        scheduler: Its own scheduler, if there is one.
        scaler: Its own gradient scaler, if there is one.
    """

    def __init__(
        self,
        mixture: Mixture,
        binding: ModelBinding,
        scaler: torch.amp.GradScaler | None,
        passes: PairedPasses,
        state: State,
    ) -> None:
        self.name, self.task_weights, self.lr_scale = mixture.name, dict(mixture.task_weights), mixture.lr_scale
        self.model, self.optimizer = binding.model, binding.optimizer
        self.scheduler, self.scaler = binding.scheduler, scaler
        self._mixture, self._binding, self._passes, self._state = mixture, binding, passes, state
        self._steps = 0  # of the optimizer, since the last merge

    def paired(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader so that every branch gets the same batches and the same randomness.

        The n-th pass over a loader in a round is a pure function of the fork's seed, for shuffling, augmentation (also
        in loader workers) and dropout alike. Loaders may be zipped, and a branch may use fewer than another. The
        caller's random states come back when the passes have ended.
        """
        return self._passes.batches(loader)

    def _count_step(self, *_: Any) -> None:
        self._steps += 1

    def __repr__(self) -> str:
        return f"ForkedBranch({self.name!r}, {self.task_weights}, lr_scale={self.lr_scale:g})"


class BranchModels(ABC):
    """Which module the branches of a fork are trained in.

    Args:
        branches: The branches.
    """

    def __init__(self, branches: Sequence[ForkedBranch]) -> None:
        self.branches = list(branches)

    @abstractmethod
    def each(self) -> Iterator[ForkedBranch]:
        """Yield every branch, ready to be trained."""

    @abstractmethod
    def gather(self) -> list[State]:
        """Bring every branch's state up to date with its model and optimizer, and return them."""

    @abstractmethod
    def attach(self, merged: State) -> None:
        """Let models and optimizers show the branches' states; a model that no branch has shows the last merge."""

    @abstractmethod
    def check_free(self, action: str) -> None:
        """Refuse what cannot be done while a branch is being trained."""
