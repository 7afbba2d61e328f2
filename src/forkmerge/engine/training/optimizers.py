"""Optimizer and scheduler factories that pickle, compare and print, for recipes and worker processes."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from forkmerge.errors import ProblemError, is_count, is_number, unknown_name

_NUMBERS = ("int", "float", "<class 'int'>", "<class 'float'>")  # annotations
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")


class _Factory:
    """A class of torch and the options to make it with."""

    def __init__(self, kind: type, options: Mapping[str, Any]) -> None:
        self.kind, self.options = kind, dict(options)
        parameters = inspect.signature(kind).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for option in options:
            if option not in parameters and not takes_any:
                raise ProblemError(unknown_name(f"option of {kind.__name__}", option, list(parameters)[1:]))

    def made(self, first: Any) -> Any:
        """Return an object of the class; what it refuses is said in one sentence, by the name of the class."""
        for name, value in self.options.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ProblemError(f"{self!r} cannot be made: {name} must be finite.")
        try:
            return self.kind(first, **self.options)
        except (TypeError, ValueError) as error:
            text = next((name for name, value in self.options.items() if self._wants_number(name, value)), None)
            if isinstance(error, TypeError) and text is not None:
                wanted = f"{text} must be a number, got {self.options[text]!r}"
                raise ProblemError(f"{self!r} cannot be made: {wanted}.") from error
            reason = str(error).replace(f"{self.kind.__name__}.__init__() ", "").rstrip(".")
            raise ProblemError(f"{self!r} cannot be made: {reason}.") from error

    def _wants_number(self, name: str, value: Any) -> bool:
        """Whether text stands where the class wants a number."""
        parameter = inspect.signature(self.kind).parameters.get(name)
        if not isinstance(value, str) or parameter is None:
            return False
        return is_number(parameter.default) or str(parameter.annotation) in _NUMBERS

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.kind.__name__}({options})"


class OptimizerOf(_Factory):
    """A picklable optimizer factory over all parameters, or over groups with learning rates of their own.

    Args:
        kind: An optimizer class, or the name of one in `torch.optim`.
        group_lr: `{prefix: factor}`: parameters whose name starts with the prefix get that share of `lr`.
        **options: Passed to the class.

    Example:
        >>> import torch, forkmerge as fm
        >>> fm.OptimizerOf("SGD", lr=0.1)(torch.nn.Linear(2, 1)).defaults["lr"]
        0.1
    """

    def __init__(
        self, kind: str | type[Optimizer], group_lr: Mapping[str, float] | None = None, **options: Any
    ) -> None:
        super().__init__(_find(optim, Optimizer, "optimizer", kind), options)
        self.group_lr = dict(group_lr or {})

    def __call__(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of a model's trainable parameters."""
        if not self.group_lr:
            return self._make([p for p in model.parameters() if p.requires_grad])
        groups: dict[float, list[Tensor]] = {}
        for name, parameter in model.named_parameters():
            factor = next((f for prefix, f in self.group_lr.items() if name.startswith(prefix)), 1.0)
            if parameter.requires_grad:
                groups.setdefault(factor, []).append(parameter)
        lr = self.options.get("lr")
        if not is_number(lr):
            raise ProblemError(f"{self!r} has shares of a learning rate, which must be a number: give lr=….")
        return self._make([{"params": p, "lr": lr * f} for f, p in groups.items()])

    def _make(self, parameters: list[Any]) -> Optimizer:
        optimizer: Optimizer = self.made(parameters)
        return optimizer

    def __repr__(self) -> str:
        return super().__repr__() + (f" × {self.group_lr}" if self.group_lr else "")


class EverySteps(LRScheduler):
    """A scheduler that moves once in so many steps, as one that is called at the end of an epoch does.

    Args:
        inner: The scheduler.
        every: Steps between its moves.
    """

    def __init__(self, inner: LRScheduler, every: int) -> None:
        self.inner, self.every, self.count = inner, every, 0
        self.optimizer = inner.optimizer

    def step(self, epoch: int | None = None) -> None:
        """Count a step, and move where an epoch ends."""
        del epoch  # what torch would like nobody to pass
        self.count += 1
        if self.count % self.every == 0:
            self.inner.step()

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates of now."""
        return self.inner.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the count, and the state of the scheduler inside."""
        return {"count": self.count, "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both back."""
        self.count = state_dict["count"]
        self.inner.load_state_dict(state_dict["inner"])


class SchedulerOf(_Factory):
    """A picklable scheduler factory; the scheduler runs on the global step.

    Args:
        kind: A scheduler class, or the name of one in `torch.optim.lr_scheduler`.
        every: It moves once in so many steps, such as an epoch has, or a share as below; its options count moves then.
        **options: Passed to the class after the optimizer. "50%" stands for that share of the run's steps; where an
            algorithm consists of several runs, such as Post-train, for that of each.

    Example:
        >>> import forkmerge as fm
        >>> fm.SchedulerOf("MultiStepLR", milestones=["50%", "80%"]).over(1000)
        MultiStepLR(milestones=[500, 800])
    """

    def __init__(self, kind: str | type[LRScheduler], every: int | str = 1, **options: Any) -> None:
        super().__init__(_find(optim.lr_scheduler, LRScheduler, "scheduler", kind), options)
        if not is_count(every) and _steps_of(every, 100) == every:
            raise ProblemError(f"a scheduler moves every so many steps, such as 2500 or '5%', got every={every!r}.")
        self.every = every

    def over(self, steps: int) -> SchedulerOf:
        """Return the factory for a run of so many steps: shares become numbers."""
        options = {name: _steps_of(value, steps) for name, value in self.options.items()}
        return SchedulerOf(self.kind, _steps_of(self.every, steps), **options)

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        """Return the scheduler of an optimizer."""
        options = {"every": self.every, **self.options}
        shares = [name for name, value in options.items() if _steps_of(value, 100) != value]
        if shares:
            raise ProblemError(
                f"{self!r}: {shares[0]} is a share of the run's steps; say of how many with over(steps)."
            )
        scheduler: LRScheduler = self.made(optimizer)
        return scheduler if self.every == 1 else EverySteps(scheduler, int(self.every))

    def __repr__(self) -> str:
        return super().__repr__() + (f" every {self.every} steps" if self.every != 1 else "")


def state_share(optimizer: Optimizer) -> float:
    """Return the bytes that an optimizer will keep, in units of its parameters': 2 for Adam, 0 for plain descent."""
    parameter = nn.Parameter(torch.zeros(1024))
    parameter.grad = torch.zeros_like(parameter)
    try:
        twin = type(optimizer)([parameter], **optimizer.defaults)
        twin.step()
    except Exception:  # one that is made in another way: most of those that keep anything keep this much
        return 2.0
    kept = sum(value.nbytes for value in twin.state[parameter].values() if isinstance(value, Tensor) and value.dim())
    return kept / parameter.nbytes


def _steps_of(value: Any, steps: int) -> Any:
    """Return a number of steps for a share such as "80%", in lists too; at least 1. Anything else is itself."""
    if isinstance(value, list | tuple):
        return type(value)(_steps_of(each, steps) for each in value)
    share = _SHARE.fullmatch(value) if isinstance(value, str) else None
    return value if share is None else max(1, round(float(share[1]) / 100 * steps))


def _find(module: Any, base: type, what: str, kind: str | type) -> type:
    if not isinstance(kind, str):
        return kind
    kinds = {
        name: item
        for name, item in vars(module).items()
        if isinstance(item, type) and issubclass(item, base) and item is not base
    }
    if kind not in kinds:
        raise ProblemError(unknown_name(what, kind, (name for name in kinds if not name.startswith("_"))))
    return kinds[kind]
