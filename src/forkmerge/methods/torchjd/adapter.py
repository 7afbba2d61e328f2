"""TorchJD's scalarizers, weightings and aggregators as methods, with their whole state saved."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torchjd
from torch import Tensor, nn
from torchjd import aggregation
from torchjd.scalarization import Scalarizer

from forkmerge.errors import ProblemError
from forkmerge.methods.base import (
    GramianMethod,
    LossMethod,
    MatrixMethod,
    Method,
    MethodState,
    View,
    adam,
    constant,
    pick,
    precise,
    spread,
)
from forkmerge.methods.context import Array, MethodContext, Setup
from forkmerge.methods.torchjd.module_state import export_state, import_state, opaque_attributes
from forkmerge.methods.torchjd.names import build_named
from forkmerge.problem.randomness import set_random_state


@dataclass(frozen=True)
class Source:
    """Where a TorchJD object comes from: made from its name, or a copy of the one given.

    Args:
        text: Its name, with arguments.
        given: The object itself.
    """

    text: str
    given: nn.Module | None = field(default=None, compare=False, repr=False)  # the name stands in run folders

    def make(self, tasks: int) -> nn.Module:
        """Return a fresh object for a number of tasks."""
        if self.given is not None:
            return copy.deepcopy(self.given)
        return build_named(self.text, tasks)


class _Adapter:
    """What the three kinds of methods below have in common: one object, into which a branch's state is put for a call.

    The objects are scratch paper: everything that lasts is in the branch's state, one entry per set of present tasks,
    because most of these objects cannot change their number of tasks.
    """

    source: Source

    def start(self, setup: Setup) -> MethodState:
        """Start from a fresh object."""
        del setup
        return {"objects": {}}

    def _make(self, tasks: int) -> nn.Module:
        return self.source.make(tasks)

    def _module(self, tasks: int) -> nn.Module:
        cache: dict[int, nn.Module] = self.__dict__.setdefault("_scratch", {})
        if tasks not in cache:
            cache[tasks] = self._make(tasks)
        return cache[tasks]

    def _open(self, key: str, tasks: int, state: MethodState) -> nn.Module:
        """Return the object with the state it had after its last call for these tasks."""
        module = self._module(tasks)
        if not _keeps_state(module):
            return module
        if key not in state["objects"]:
            state["objects"][key] = export_state(self._make(tasks))
        import_state(module, state["objects"][key])
        return module

    def _close(self, key: str, module: nn.Module, state: MethodState) -> None:
        if _keeps_state(module):
            state["objects"][key] = export_state(module)

    def _call(self, key: str, view: View, state: MethodState, value: Tensor) -> Tensor:
        module = self._open(key, len(view.present), state)
        if value.device.type != "cpu":  # a state read from disk is on the CPU
            module.to(value.device)
        set_random_state(view.seed)
        try:
            result: Tensor = module(value)
        except (ValueError, RuntimeError) as error:
            raise ProblemError(
                f"TorchJD's {self.source.text} failed on a step with {len(view.present)} tasks "
                f"({', '.join(view.setup.tasks[i] for i in view.present)}): {error}"
            ) from error
        self._close(key, module, state)
        return result.detach()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_scratch"}


@dataclass(frozen=True)
class TorchJDScalarizer(_Adapter, LossMethod):
    """A TorchJD scalarizer: the weights are the derivatives of its value by the losses.

    A task without a label enters with its last loss. Parameters of the scalarizer's own are trained by Adam at the
    model's learning rate; `update` is called with the losses after the step, `step` after every epoch.

    State: all that the object keeps.
    Passes: none beyond the step's own; one more forward pass for objects with an `update`.
    Memory: a copy of the branch in training.
    Target: not needed.
    Heads: weighted like the rest.

    References:
        TorchJD: Quinton and Rey, Jacobian Descent for Multi-Objective Optimization, 2024.
    """

    source: Source

    def start(self, setup: Setup) -> MethodState:
        """Start from a fresh object."""
        return {"objects": {}, "last": constant(1.0, setup), "epoch": 0}

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        """Return the derivatives, and train the object's parameters."""
        tasks = len(view.setup.tasks)
        module = self._open("", tasks, state).to(losses.device)
        set_random_state(view.seed)
        self._turn(module, view, state)
        self._remember(spread(losses, view), state)
        names, parameters = zip(*module.named_parameters(), strict=True) if list(module.parameters()) else ((), ())
        with torch.enable_grad():
            values = state["last"].to(torch.get_default_dtype()).detach().requires_grad_()
            gradients = torch.autograd.grad(module(values), [values, *parameters], allow_unused=True)
        for name, parameter, gradient in zip(names, parameters, gradients[1:], strict=True):
            if gradient is not None:
                self._train(name, parameter, gradient, view.lr, state)
        self._close("", module, state)
        return pick(gradients[0].to(losses), view)

    def after_step(self, context: MethodContext, state: MethodState) -> None:
        """Tell the object the losses of the same batch after the step, if it asks for them."""
        tasks = len(context.setup.tasks)
        if not hasattr(self._module(tasks), "update") or "" not in state["objects"]:
            return
        module = self._open("", tasks, state)
        losses = context.losses()
        values = torch.where(losses.isfinite(), losses, state["last"])
        cast(Any, module).update(values.to(torch.get_default_dtype()))
        self._close("", module, state)

    @staticmethod
    def _remember(losses: Tensor, state: MethodState) -> None:
        state["last"] = torch.where(losses == losses, losses, state["last"])

    def _turn(self, module: nn.Module, view: View, state: MethodState) -> None:
        epoch = view.step // view.setup.epoch
        if epoch != state["epoch"] and hasattr(module, "step"):
            cast(Any, module).step()
        state["epoch"] = epoch

    def _train(
        self, name: str, parameter: nn.Parameter, gradient: Tensor, lr: float | Tensor, state: MethodState
    ) -> None:
        key, kind = f"adam {name}", precise(parameter.device)
        state[key] = parameter.detach().flatten().to(kind)
        adam(state, key, gradient.flatten().to(kind), lr)
        parameter.data.copy_(state[key].view_as(parameter))


@dataclass(frozen=True)
class TorchJDWeighting(_Adapter, GramianMethod):
    """A TorchJD weighting of the Gramian, or the one inside an aggregator.

    State: all that the object keeps.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: not needed.
    Heads: unweighted.

    References:
        TorchJD: Quinton and Rey, Jacobian Descent for Multi-Objective Optimization, 2024.
    """

    source: Source

    def _make(self, tasks: int) -> nn.Module:
        module = self.source.make(tasks)
        inner = getattr(module, "gramian_weighting", module)
        assert isinstance(inner, nn.Module)
        return inner

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return what the object says to the Gramian."""
        weights: Array = self._call(_key(view), view, state, torch.from_numpy(gramian.copy())).double().numpy()
        return weights


@dataclass(frozen=True)
class TorchJDAggregator(_Adapter, MatrixMethod):
    """A TorchJD aggregator, or weighting of the matrix of gradients.

    Weightings of TorchJD that want the products of two batches' gradients get them: they cost K more passes.

    State: all that the object keeps.
    Passes: one backward pass per task.
    Memory: K shared gradients, twice.
    Target: not needed.
    Heads: unweighted.

    References:
        TorchJD: Quinton and Rey, Jacobian Descent for Multi-Objective Optimization, 2024.
    """

    source: Source

    def direction(self, matrix: Tensor, view: View, state: MethodState) -> Tensor:
        """Return what the object makes of the matrix."""
        module = self._module(len(view.present))
        if isinstance(module, aggregation.Aggregator):
            return self._call(_key(view), view, state, matrix)
        statistic = matrix
        if _wants_two_batches(module):
            statistic = torch.from_numpy(view.context.cross_gramian(view.present)).to(matrix)
        return self._call(_key(view), view, state, statistic) @ matrix


def torchjd_named(text: str) -> Method:
    """Return the method for a TorchJD class by name, e.g. "UPGrad" or "CAGrad(c=0.5)"."""
    return _adapted(Source(text), build_named(text, 2))


def torchjd_object(value: object) -> Method:
    """Return the method for a TorchJD scalarizer, weighting or aggregator."""
    if not isinstance(value, Scalarizer | aggregation.Aggregator | aggregation.Weighting):
        raise ProblemError(f"of TorchJD a scalarizer, weighting or aggregator is accepted, got {value!r}.")
    text = repr(value)
    # The text is part of a run's configuration, which must be the same in every process.
    return _adapted(Source(type(value).__name__ if " at 0x" in text else text, value), value)


def _adapted(source: Source, sample: nn.Module) -> Method:
    for part in sample.modules():
        hidden = opaque_attributes(part) if isinstance(part, torchjd.Stateful) else []
        if hidden:
            raise ProblemError(
                f"TorchJD's {type(part).__name__} keeps {', '.join(hidden)} in a form that cannot be saved with a "
                "checkpoint. Use a method of forkmerge.methods in its place."
            )
    if isinstance(sample, Scalarizer):
        return TorchJDScalarizer(source)
    if isinstance(getattr(sample, "gramian_weighting", None), aggregation.Weighting) or _weighs_gramian(sample):
        return TorchJDWeighting(source)
    return TorchJDAggregator(source)


def _weighs_gramian(module: nn.Module) -> bool:
    """Whether a weighting says that it reads a Gramian; a wrapper of another one reads what that one does."""
    if not isinstance(module, aggregation.Weighting):
        return False
    if isinstance(module, aggregation.CRMOGMWeighting):
        return _weighs_gramian(module.weighting)
    statistic = list(inspect.signature(type(module).forward).parameters.values())[1].annotation
    return "PSDMatrix" in str(getattr(statistic, "__name__", statistic))


def _wants_two_batches(module: nn.Module) -> bool:
    inner = module.weighting if isinstance(module, aggregation.CRMOGMWeighting) else module
    return isinstance(inner, aggregation.MoDoWeighting | aggregation.SDMGradWeighting)


def _keeps_state(module: nn.Module) -> bool:
    """Whether a call may change the object: TorchJD marks those of its own."""
    return any(
        isinstance(part, torchjd.Stateful) or part._parameters or not type(part).__module__.startswith("torchjd.")
        for part in module.modules()
    )


def _key(view: View) -> str:
    return "+".join(view.setup.tasks[i] for i in view.present)
