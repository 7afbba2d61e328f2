"""What a branch multiplies the schedule's learning rates by: its own factor, and a fall over the end of a round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from forkmerge.errors import ProblemError


@dataclass(frozen=True)
class Anneal:
    """A linear fall of the learning rate: (end − t) / (end − start) at step t, from 1 at `start` to 0 at `end`.

    The last step, end − 1, still has 1 / (end − start) of its rate.

    Args:
        start: The first step that it concerns.
        end: The step after the last.
    """

    start: int
    end: int

    def factor(self, step: int) -> float:
        """Return what the rate of a step is multiplied by."""
        return (self.end - step) / (self.end - self.start)


@contextmanager
def rates_times(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply every parameter group's learning rate inside; the schedule goes on from the rates there were.

    Schedulers may derive a rate from the one before, so what they see is never multiplied.
    """
    if factor == 1:
        yield
        return
    rates = multiply_rates(optimizer, factor)
    try:
        yield
    finally:
        restore_rates(optimizer, rates)


def multiply_rates(optimizer: Optimizer, factor: float) -> list[Any]:
    """Multiply every parameter group's learning rate, and return those there were."""
    groups = optimizer.param_groups
    if any("lr" not in group for group in groups):
        raise ProblemError(
            f"{type(optimizer).__name__} has parameter groups without a learning rate 'lr', which a branch's lr_scale "
            "and an annealed tail multiply: take another optimizer, or lr_scale=1 and tail_anneal='none'."
        )
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor  # a new object: where it is a tensor, others may hold the old one
    return rates


def restore_rates(optimizer: Optimizer, rates: list[Any]) -> None:
    """Give every parameter group its rate back."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class ScaledSteps:
    """Multiplies the learning rates inside every step of an optimizer that somebody else drives.

    Between steps the rates are the schedule's, also after a step that failed, once the next one begins.

    Args:
        optimizer: The optimizer; it holds this object by its hooks.
        factor: What the rates are multiplied by.
    """

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self.optimizer, self.factor = optimizer, factor
        self._rates: list[Any] | None = None
        if factor != 1:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def _before(self, *_: Any) -> None:
        self._after()
        self._rates = multiply_rates(self.optimizer, self.factor)

    def _after(self, *_: Any) -> None:
        if self._rates is not None:
            restore_rates(self.optimizer, self._rates)
        self._rates = None
