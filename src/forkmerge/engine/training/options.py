"""The options of a branch: its task weights, and how every branch of a run is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch.optim import Optimizer

from forkmerge.engine.training.memory_format import suits_channels_last, to_channels_last
from forkmerge.engine.training.model_binding import ModelBinding, OptimizerFactory, SchedulerFactory
from forkmerge.engine.training.optimizers import SchedulerOf
from forkmerge.engine.training.torch_compile import backend_of, install
from forkmerge.errors import ProblemError, check_count, check_flag, check_name, is_count, is_number, unknown_name
from forkmerge.methods.base import LossMethod, Method, Where
from forkmerge.problem.scoring import device_of

Precision = Literal["float32", "bfloat16", "float16"]


Statistics = Literal["all", "target"]


@dataclass(frozen=True)
class Mixture:
    """What a branch trains on, and how: its name, its task-weighting vector ν, and what its steps differ in.

    Args:
        name: How records and reports call the branch.
        task_weights: `{task: weight}`; a task left out has weight 0 and costs nothing.
        lr_scale: Factor on the learning rate of every parameter group at every step, whatever the schedule says.
        auxiliary_streams: Of the streams that do not serve the target, a step reads "all", or "one": each once in
            every K steps, K their number, in an order drawn anew, its losses times K, so that their sum over K steps
            is the same at a K-th of the cost. Makes no difference to sampling weights, which draw one task per step.
    """

    name: str
    task_weights: Mapping[str, float]
    lr_scale: float = 1.0
    auxiliary_streams: Literal["all", "one"] = "all"

    def __post_init__(self) -> None:
        check_name("branch", self.name)
        object.__setattr__(self, "task_weights", dict(self.task_weights))
        if not (is_number(self.lr_scale) and 0 < self.lr_scale < math.inf):
            raise ProblemError(f"branch {self.name!r}: lr_scale must be a positive number, got {self.lr_scale!r}.")
        object.__setattr__(self, "lr_scale", float(self.lr_scale))
        if self.auxiliary_streams not in ("all", "one"):
            raise ProblemError(
                f"branch {self.name!r}: auxiliary_streams must be 'all' or 'one', got {self.auxiliary_streams!r}."
            )

    def to_value(self) -> list[Any]:
        """Return plain data: name and task weights and, where something else is not as usual, a dict of that."""
        default = Mixture(self.name, {})
        named = {item.name: getattr(self, item.name) for item in fields(self)[2:]}
        options = {name: value for name, value in named.items() if value != getattr(default, name)}
        return [self.name, dict(self.task_weights), *([options] if options else [])]

    @classmethod
    def from_value(cls, value: Sequence[Any]) -> Mixture:
        """Return the mixture that `to_value` described."""
        name, weights, *options = value
        return cls(name, weights, **(options[0] if options else {}))

    def active(self, tasks: Sequence[str]) -> list[str]:
        """The tasks, out of the given ones, whose weight is not 0."""
        return [task for task in tasks if self.task_weights.get(task, 0.0) > 0]


def mixtures_of(branches: Mapping[str, Mapping[str, Any]] | Sequence[Mixture]) -> list[Mixture]:
    """Return the branches that a mapping or a sequence names.

    Args:
        branches: `{name: {task: weight}}`, or `{name: {"task_weights": {task: weight}, "lr_scale": 3}}` with options of
            `Mixture`, or `Mixture`s.
    """
    if not isinstance(branches, Mapping):
        if not isinstance(branches, list | tuple) or not all(isinstance(branch, Mixture) for branch in branches):
            raise ProblemError(f"branches must be {{name: {{task: weight}}}}, got {type(branches).__name__}.")
        return list(branches)
    options = [item.name for item in fields(Mixture)[1:]]
    result = []
    for name, value in branches.items():
        if isinstance(value, Mapping) and isinstance(value.get("task_weights"), Mapping):
            for option in value:
                if option not in options:
                    raise ProblemError(f"branch {name!r}: " + unknown_name("option of a branch", option, options))
            result.append(Mixture(name, **value))
        elif isinstance(value, Mapping):
            result.append(Mixture(name, value))
        else:
            raise ProblemError(f"branch {name!r}: task weights must be {{task: weight}}, got {value!r}.")
    return result


@dataclass(frozen=True)
class Training:
    """How every branch of a run is trained.

    Args:
        optimizer: Makes the optimizer from the model.
        scheduler: Makes a scheduler from the optimizer; it runs on the global step.
        clip_norm: Largest gradient norm, over all parameters; None does not clip.
        accumulate: Micro-batches per step; the step's gradient is their mean.
        precision: "float32", or autocast to "bfloat16" or "float16" (the latter with a gradient scaler).
        channels_last: Keep convolution weights in channels-last memory format; None decides by rule.
        compile: Whether forward passes are compiled by `torch.compile`: True, or the name of a backend.
        loader_workers: Processes that read examples; the run's bits do not depend on it.
        paired: Whether branches see the same batches (True), or each its own.
        method: How the tasks of a branch are combined; None sums their weighted losses. A branch with one task
            needs none.
        gradients: Where gradient methods compare tasks: at the shared "parameters", or, approximately and cheaper,
            at the declared "representation".
        statistics: Whose batches move BatchNorm's running statistics: those of "all" streams, or only those of streams
            that serve the "target", which is measured with them; layers that the target does not pass, and branches
            without it, follow all. It makes no difference where one stream serves all tasks.
        lr_of: Prefix of the names of parameters whose learning rate a method takes for the model's (its `lr=None`);
            None takes that of the optimizer's first parameter group.
    """

    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    precision: Precision = "float32"
    channels_last: bool | None = None
    compile: bool | str = False
    loader_workers: int = 0
    paired: bool = True
    method: Method | None = None
    gradients: Literal["parameters", "representation"] = "parameters"
    statistics: Statistics = "all"
    lr_of: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.optimizer):
            got = repr(self.optimizer) if isinstance(self.optimizer, str) else type(self.optimizer).__name__
            raise ProblemError(
                f"optimizer must be a function of the model that returns an optimizer, such as "
                f"OptimizerOf('Adam', lr=1e-3), got {got}."
            )
        if self.precision not in ("float32", "bfloat16", "float16"):
            raise ProblemError(f"precision must be float32, bfloat16 or float16, got {self.precision!r}.")
        check_count("accumulate", self.accumulate)
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise ProblemError(f"clip_norm must be a positive number, or None, got {self.clip_norm!r}.")
        check_flag("paired", self.paired)
        if self.lr_of is not None and not isinstance(self.lr_of, str):
            raise ProblemError(f"lr_of must be the beginning of parameters' names, or None, got {self.lr_of!r}.")
        if self.channels_last not in (None, True, False):
            raise ProblemError(f"channels_last must be True, False or None (by rule), got {self.channels_last!r}.")
        if self.compile:
            backend_of(self.compile)
        if not is_count(self.loader_workers, 0):
            raise ProblemError(f"loader_workers must be an integer ≥ 0, got {self.loader_workers!r}.")
        if self.gradients not in ("parameters", "representation"):
            raise ProblemError(f"gradients must be 'parameters' or 'representation', got {self.gradients!r}.")
        if self.statistics not in get_args(Statistics):
            raise ProblemError(f"statistics must be 'all' or 'target', got {self.statistics!r}.")
        if self.compared_at != "parameters" and self.accumulate > 1:
            raise ProblemError(f"gradients={self.compared_at!r} combines one micro-batch per step: use accumulate=1.")

    @property
    def compared_at(self) -> Where:
        """Where gradients are compared: as the method itself says, or else `gradients`."""
        own = None if self.method is None else self.method.gradients
        return own or self.gradients

    def over(self, steps: int) -> Training:
        """Return the same for a run of so many steps: a schedule may be given in shares of them."""
        return replace(self, scheduler=self.scheduler.over(steps)) if isinstance(self.scheduler, SchedulerOf) else self

    def binding(self, model: torch.nn.Module) -> ModelBinding:
        """Return the model and optimizer, bound to train this way."""
        if suits_channels_last(model, self.precision) if self.channels_last is None else self.channels_last:
            to_channels_last(model)
        if self.compile:
            install(model, self.compile)
        scaler = torch.amp.GradScaler(device_of(model).type, enabled=self.precision == "float16")
        return ModelBinding(model, self.optimizer, self.scheduler, scaler, lr_of=self.lr_of)

    def rate_note(self, optimizer: Optimizer) -> str | None:
        """Say whose learning rate a method takes for the model's, where parameter groups differ and nobody chose."""
        rates = list(dict.fromkeys(float(group["lr"]) for group in optimizer.param_groups))
        if self.method is None or self.lr_of is not None or len(rates) == 1:
            return None
        return (
            f"where the method follows the model's learning rate it takes that of the first parameter group, "
            f"{rates[0]:g} (others have {', '.join(f'{rate:g}' for rate in rates[1:])}): lr_of=… names other parameters"
        )

    @property
    def weighs_losses(self) -> bool:
        """Whether branches are trained by a method that sees losses only."""
        return isinstance(self.method, LossMethod)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context a forward pass runs in."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(device.type, dtype=getattr(torch, self.precision))
