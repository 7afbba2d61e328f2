"""The one module and optimizer of a process, and the states it works on.

`attach` points the module's parameters, and the optimizer's tensors, at a state's rows without copying them, so
B branches cost B rows, not B modules. Frozen parameters stay in the module and are shared by all branches; a buffer
is stored with a branch only once it differs from the module's own. The shards of a sharded module stay where they are,
since FSDP2 remembers their memory: rows are copied into them, and back by `resync`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from forkmerge.engine.training.batchnorm import BatchNorm
from forkmerge.engine.training.module_checks import check_module
from forkmerge.engine.training.release_memory import give_back
from forkmerge.engine.training.remote_rows import RemoteRows
from forkmerge.engine.training.shards import is_sharded, local_of, plain_name, reshard, sharded_like
from forkmerge.engine.training.state import Layout, State
from forkmerge.errors import ProblemError

OptimizerFactory = Callable[[nn.Module], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


class ModelBinding:
    """One module, one optimizer, scheduler and scaler, working on whichever state is attached.

    Args:
        model: The module. Its trainable parameters become views of rows.
        optimizer: Makes the optimizer from the module.
        scheduler: Makes the scheduler from the optimizer; it is stepped once per global step.
        scaler: Scales losses for float16; a disabled one by default.
        lr_of: Prefix of the parameters whose learning rate is the model's; the first group's where None.

    Attributes:
        suspects: Branches in whose last segment something was not finite: a hint where to look step by step.
        target_norms: The BatchNorm layers that the target's batches pass, once somebody has found out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory | Optimizer,
        scheduler: SchedulerFactory | LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        lr_of: str | None = None,
    ) -> None:
        check_module(model, may_span=True)
        self.model = model
        self.layout = Layout(model)
        if not self.layout.slices:
            raise ProblemError("the model has no trainable parameter: nothing could be trained or merged.")
        self.optimizer = optimizer if isinstance(optimizer, Optimizer) else make_optimizer(optimizer, model)
        check_optimizer(self.optimizer, model)
        self.scheduler = make_scheduler(scheduler, self.optimizer)
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.own_buffers = {name: buffer.clone() for _, _, name, buffer in self._buffers()}
        self.suspects: set[str] = set()
        self.target_norms: list[BatchNorm] | None = None
        self._lr_group = self._find_lr_group(lr_of)
        self._index = {id(parameter): i for i, parameter in enumerate(self.layout.parameters)}

    @property
    def lr(self) -> float | Tensor:
        """The model's current learning rate; a tensor where the optimizer keeps it as one."""
        lr: float | Tensor = self.optimizer.param_groups[self._lr_group]["lr"]
        return lr

    def _find_lr_group(self, prefix: str | None) -> int:
        if prefix is None:
            return 0
        named = {id(p) for name, p in self.model.named_parameters() if name.startswith(prefix)}
        groups = enumerate(self.optimizer.param_groups)
        index = next((i for i, group in groups if any(id(p) in named for p in group["params"])), None)
        if index is None:
            names = dict.fromkeys(name.split(".")[0] for name, _ in self.model.named_parameters())
            raise ProblemError(f"lr_of: no trained parameter's name starts with {prefix!r}: {', '.join(names)} do.")
        return index

    def initial(self) -> State:
        """Return the state of the module as it is now, attached."""
        state = State(step=0, rows={})
        for row_slice, parameter in zip(self.layout.slices, self.layout.parameters, strict=True):
            if row_slice.row not in state.rows:
                state.rows[row_slice.row] = self.layout.new_row(row_slice.row, parameter.dtype, local_of(parameter))
            row_slice.view(state.rows[row_slice.row]).copy_(local_of(parameter).detach())
        self._point_parameters(state)
        self.give_back()
        self.capture(state)
        return state

    def place(self, state: State) -> State:
        """Move a state that was read from disk or another process to the devices of the module."""
        for row_slice, parameter in zip(self.layout.slices, self.layout.parameters, strict=True):
            state.rows[row_slice.row] = state.rows[row_slice.row].to(parameter.device)
        if isinstance(state.optimizer_rows, RemoteRows):
            state.optimizer_rows.when_here(self._place_rows)
        else:
            self._place_rows(state.optimizer_rows)
        for name, buffer in state.buffers.items():
            own = self.own_buffers.get(name)
            state.buffers[name] = buffer if own is None else buffer.to(own.device)
        for index, entry in state.optimizer_loose.items():
            group = self._group_of(index)
            on_device = group.get("fused") or group.get("capturable")
            for key, value in entry.items():
                if isinstance(value, Tensor) and (key != "step" or on_device):  # torch keeps plain counters on the CPU
                    entry[key] = value.to(self.layout.parameters[index].device)
        return state

    def _place_rows(self, rows: MutableMapping[str, Tensor]) -> None:
        devices = {s.row: p.device for s, p in zip(self.layout.slices, self.layout.parameters, strict=True)}
        for name, row in rows.items():
            rows[name] = row.to(devices.get(name.split("/", 1)[-1], row.device))

    def attach(self, state: State) -> None:
        """Point the module, and the optimizer where the state has one, at a state; nothing is copied but buffers."""
        self.attach_weights(state)
        self.attach_optimizer(state)

    def attach_weights(self, state: State) -> None:
        """Point the module at a state's parameters and buffers: enough to evaluate it."""
        if self.layout.is_sharded:
            reshard(self.model)
        self._write_buffers({**self.own_buffers, **state.buffers})
        self._point_parameters(state)

    def attach_optimizer(self, state: State) -> None:
        """Point the optimizer, its scheduler and the scaler at what a state has of them."""
        self.optimizer.state.clear()
        for index, entry in state.optimizer_loose.items():
            self.optimizer.state[self.layout.parameters[index]] = dict(entry)
        for name, indices in state.optimizer_slots.items():
            slot = name.split("/", 1)[0]
            for index in indices:
                parameter = self.layout.parameters[index]
                view = self.layout.slices[index].view(state.optimizer_rows[name])
                self.optimizer.state[parameter][slot] = sharded_like(view, parameter)
        for group, saved in zip(self.optimizer.param_groups, state.groups, strict=True):
            group.update(copy.deepcopy(saved))
        if self.scheduler:
            self.scheduler.load_state_dict(copy.deepcopy(state.scheduler))
        if state.scaler:
            self.scaler.load_state_dict(dict(state.scaler))

    def capture(self, state: State) -> None:
        """Write what is not a view of the attached state's rows into it: new optimizer tensors, buffers, counters."""
        entries = self._entries()
        state.optimizer_slots, state.optimizer_loose = {}, {index: {} for index in entries}
        # Slot by slot: the tensors of one are gone before the row of the next is made.
        before = len(state.optimizer_rows)
        for key in dict.fromkeys(key for entry in entries.values() for key in entry):
            for index, entry in entries.items():
                if key in entry and not self._adopt(state, index, key, entry[key]):
                    state.optimizer_loose[index][key] = entry[key]
        if len(state.optimizer_rows) > before:
            self.give_back()
        self.capture_buffers(state)
        state.groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        state.scheduler = copy.deepcopy(self.scheduler.state_dict()) if self.scheduler else {}
        state.scaler = dict(self.scaler.state_dict())

    def resync(self, state: State) -> None:
        """Take parameters back into the state's rows that someone has given other memory (`.to`, `.data = …`)."""
        for row_slice, parameter in zip(self.layout.slices, self.layout.parameters, strict=True):
            view, local = row_slice.view(state.rows[row_slice.row]), local_of(parameter)
            if local.data_ptr() != view.data_ptr():
                view.copy_(local.detach())
        self._point_parameters(state)

    def capture_buffers(self, state: State) -> None:
        """Store the module's buffers with the state, those that differ from the module's own."""
        state.buffers = {
            name: buffer.detach().clone()
            for _, _, name, buffer in self._buffers()
            if name not in self.own_buffers or not torch.equal(buffer, self.own_buffers[name])
        }

    def buffer(self, state: State, name: str) -> Tensor:
        """Return a state's value of a buffer, which is the module's own where the state has none."""
        return state.buffers[name] if name in state.buffers else self.own_buffers[name]

    def restore_buffers(self) -> None:
        """Give the module its own buffers back, as they were when the binding was made."""
        self._write_buffers(self.own_buffers)

    def release(self, state: State) -> None:
        """Leave the module with a state's weights in memory of its own, independent of any row."""
        self.attach_weights(state)
        self.optimizer.state.clear()
        for parameter in self.layout.parameters:
            parameter.data = parameter.data.clone()
            parameter.grad = None

    def drop_gradients(self) -> None:
        """Free the gradients: one model size that a merge can use instead."""
        self.optimizer.zero_grad(set_to_none=True)

    def give_back(self) -> None:
        """Hand what was freed, gradients above all, to the operating system, if the model is large enough to matter."""
        give_back(self.layout.nbytes)

    def _entries(self) -> dict[int, dict[str, Any]]:
        """The optimizer's own state of every trainable parameter, by position."""
        for parameter in self.optimizer.state:
            if not isinstance(parameter, nn.Parameter):
                raise ProblemError(
                    f"{type(self.optimizer).__name__} keeps state under {parameter!r}, which belongs to no parameter, "
                    "so it can be neither merged nor saved: keep it per parameter or in a parameter group."
                )
        state = self.optimizer.state.items()
        return {self._index[id(parameter)]: entry for parameter, entry in state if id(parameter) in self._index}

    def _group_of(self, index: int) -> dict[str, Any]:
        parameter = self.layout.parameters[index]
        return next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))

    def _point_parameters(self, state: State) -> None:
        for row_slice, parameter in zip(self.layout.slices, self.layout.parameters, strict=True):
            view = row_slice.view(state.rows[row_slice.row])
            if self.layout.is_sharded and is_sharded(parameter):
                local_of(parameter).copy_(view)
            else:
                parameter.data = view

    def _write_buffers(self, values: dict[str, Tensor]) -> None:
        """Copy values into the module's buffers: in place where they fit, since modules may share one."""
        for owner, key, name, buffer in list(self._buffers()):
            value = values.get(name)
            if value is None:
                continue
            if buffer.shape == value.shape and buffer.dtype == value.dtype:
                buffer.copy_(value)
            else:
                owner._buffers[key] = value.clone()

    def _adopt(self, state: State, index: int, key: str, value: Any) -> bool:
        """Move an optimizer tensor of the parameter's shape into its row; False if it does not belong in one."""
        row_slice, parameter = self.layout.slices[index], self.layout.parameters[index]
        if not isinstance(value, Tensor) or value.shape != parameter.shape or key == "step":
            return False
        if getattr(value, "placements", None) != getattr(parameter, "placements", None):
            return False
        if value.layout != torch.strided:
            raise ProblemError(
                f"the optimizer keeps a sparse {key!r} for the sparse gradients of {row_slice.name!r}, which cannot be "
                "merged or saved: use sparse=False, or an optimizer without it, e.g. SparseAdam or plain SGD."
            )
        name = f"{key}/{row_slice.row}"
        if name not in state.optimizer_rows:
            self.give_back()
            state.optimizer_rows[name] = self.layout.new_row(row_slice.row, value.dtype, local_of(value))
        row = state.optimizer_rows[name]
        if row.dtype != value.dtype or row.device != value.device:
            return False
        view = row_slice.view(row)
        if view.data_ptr() != local_of(value).data_ptr():
            view.copy_(local_of(value))
            self.optimizer.state[parameter][key] = sharded_like(view, parameter)
        state.optimizer_slots.setdefault(name, []).append(index)
        return True

    def _buffers(self) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
        seen: set[int] = set()
        for prefix, module in self.model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield module, key, plain_name(f"{prefix}.{key}" if prefix else key, self.layout.wrapper), buffer


def make_optimizer(factory: OptimizerFactory, model: nn.Module) -> Optimizer:
    """Call the user's factory and check that an optimizer comes back which a plain step can drive."""
    if inspect.isclass(factory):
        name = factory.__name__
        raise ProblemError(
            f"optimizer is the class {name}, which takes parameters: pass OptimizerOf({name!r}, lr=…), "
            "or a function of the model that returns an optimizer."
        )
    optimizer = factory(model)
    if not isinstance(optimizer, Optimizer):
        raise ProblemError(f"the optimizer factory must return a torch.optim.Optimizer, got {optimizer!r}.")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ProblemError(
            f"{type(optimizer).__name__} needs a closure in every step, which fit does not pass: take another "
            "optimizer, or write the loop yourself with fm.fork."
        )
    return optimizer


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer of another model's parameters: the model given would never move."""
    own_ids = {id(parameter) for parameter in model.parameters()}
    if any(id(p) not in own_ids for group in optimizer.param_groups for p in group["params"]):
        raise ProblemError("the optimizer holds parameters that are not the model's: build it from the model given.")


def make_scheduler(factory: SchedulerFactory | LRScheduler | None, optimizer: Optimizer) -> LRScheduler | None:
    """Make the scheduler, or take one that exists, refusing those that are not functions of the global step."""
    scheduler = factory(optimizer) if callable(factory) and not isinstance(factory, LRScheduler) else factory
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ProblemError(
            "ReduceLROnPlateau follows a metric, so branches would leave the common schedule: use one that is a "
            "function of the global step, e.g. CosineAnnealingLR or MultiStepLR."
        )
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        raise ProblemError(f"scheduler must give a torch.optim.lr_scheduler.LRScheduler, got {scheduler!r}.")
    return scheduler
