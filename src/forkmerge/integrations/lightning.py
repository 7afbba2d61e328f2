"""ForkMerge in a Lightning `Trainer`: a callback that trains every branch on the batches of one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from forkmerge.algorithms.own_loop.fork import Fork, fork
from forkmerge.algorithms.own_loop.forked_branch import ForkedBranch
from forkmerge.algorithms.own_loop.merge_outcome import MergeOutcome
from forkmerge.engine.merging.searches import Search, search_from
from forkmerge.engine.training.options import Mixture, mixtures_of
from forkmerge.errors import ProblemError, check_count, check_packages, unknown_name
from forkmerge.problem.randomness import random_state_kept

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:  # said at construction, so that the name can be imported
        Callback = object


class ForkMergeCallback(Callback):
    """Train branches on different task mixtures in one Lightning run, and merge them as the target's score says.

    `training_step` returns the losses of the tasks under their names, beside the "loss" that it has without ForkMerge:
    `return {"loss": ctr + dwell, "ctr": ctr, "dwell": dwell}`; what a branch minimises is Σ_k ν_k loss_k. Every batch
    is read once and every branch takes a step with it, with the same randomness; `global_step`, schedulers and loggers
    see one run. Outside of a step the module shows the last merge: it is what is validated, checkpointed and left at
    the end. Checkpoints carry the branches, so that a resumed run goes on inside a round to the same bits.

    What `training_step` logs is the first branch's. Candidates are scored by the module's own `validation_step` on the
    validation loaders; only what it logs as `monitor` is looked at, and neither other callbacks nor loggers notice.

    Args:
        branches: `{name: {task: weight}}`, as in `fork`.
        every: Steps between merges; a round that is not full when training ends is merged then.
        monitor: What `validation_step`, or `on_validation_epoch_end`, logs as the target's score.
        mode: Whether "max" or "min" of it is better.
        search: How coefficients are found; None takes a grid for two branches, greedy search for more.
        optimizer_state: At a merge, each branch may "keep" its own, all get the "average", or "reset" it.
        seed: Of what the search draws.

    Attributes:
        merges: What every merge of this process found.

    Example:
        >>> from forkmerge.integrations.lightning import ForkMergeCallback
        >>> branches = {"alone": {"ctr": 1.0}, "joint": {"ctr": 1.0, "dwell": 0.5}}
        >>> callback = ForkMergeCallback(branches, every=200, monitor="val_auc", mode="max")
    """

    def __init__(
        self,
        branches: Mapping[str, Mapping[str, Any]] | Sequence[Mixture],
        *,
        every: int,
        monitor: str,
        mode: Literal["max", "min"],
        search: Search | str | None = None,
        optimizer_state: Literal["keep", "average", "reset"] = "keep",
        seed: int = 0,
    ) -> None:
        check_packages("ForkMergeCallback", "lightning", {"lightning": "lightning"})
        if mode not in ("max", "min"):
            raise ProblemError(f"mode must be max (a score) or min (a loss), got {mode!r}.")
        self.branches, self.every = mixtures_of(branches), check_count("every", every)
        self.monitor, self.mode, self.search = monitor, mode, search_from(search)
        self.optimizer_state, self.seed = optimizer_state, seed
        self.merges: list[MergeOutcome] = []
        self._forked: Fork | None = None
        self._steps = 0  # of every branch, since the last merge
        self._stored: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}  # of a training that has ended
        self._turn: ForkedBranch | None = None
        self._module: LightningModule | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fork the module in place; its optimizer and weights are restored by now."""
        _check_trainer(trainer, pl_module)
        self._forked = fork(
            pl_module,
            trainer.optimizers[0],
            self.branches,
            search=self.search,
            optimizer_state=self.optimizer_state,
            seed=self.seed,
            in_place=True,
        )
        if self._stored is not None:
            self._forked.load_state_dict(self._stored["fork"])
        self._steps = self._stored["steps"] if self._stored is not None else 0
        self._stored = None
        self._plain_step, self._plain_training_step = pl_module.optimizer_step, pl_module.training_step
        pl_module.optimizer_step = self._optimizer_step  # type: ignore[assignment]
        pl_module.training_step = self._training_step  # type: ignore[method-assign]
        self._module = pl_module

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Merge at the end of a round."""
        if self._steps >= self.every:
            merge = self._merge(trainer)
            pl_module.log("forkmerge/score", merge.score, batch_size=1)
            for name, share in merge.coefficients.items():
                pl_module.log(f"forkmerge/coefficient/{name}", share, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge what the last round has done so far, and leave the module as it was found, with the merged weights."""
        assert self._forked is not None
        if self._steps:
            self._merge(trainer)
        self._last = self.state_dict()  # for a checkpoint that is written later, whatever becomes of the module
        self._forked = None
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the module its own methods back."""
        self._release()

    def state_dict(self) -> dict[str, Any]:
        """Return the branches, for a checkpoint."""
        return self._last if self._forked is None else {"fork": self._forked.state_dict(), "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the branches of a checkpoint, to go on with when training starts."""
        self._stored = state_dict or None

    def _optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        """Let every branch take the step: its closure computes losses of the same batch with the same randomness."""
        assert self._forked is not None
        assert self._module is not None
        last = len(self._forked) - 1
        for index, branch in enumerate(self._forked):
            self._turn = branch
            try:
                with (
                    random_state_kept() if index < last else nullcontext(),
                    _logging_to(self._module, _log_nothing) if index else nullcontext(),
                ):
                    self._plain_step(epoch, batch_idx, optimizer, closure)
            finally:
                self._turn = None
        self._steps += 1

    def _training_step(self, *arguments: Any, **options: Any) -> Any:
        output = self._plain_training_step(*arguments, **options)
        if output is None or self._turn is None:
            return output
        if not isinstance(output, Mapping):
            tasks = ", ".join(f"{task!r}: …" for task in self._turn.task_weights)
            raise ProblemError(
                f"training_step returned {type(output).__name__}: let it return every task's loss under its name, "
                f"{{'loss': …, {tasks}}}."
            )
        losses = {key: value for key, value in output.items() if key != "loss"}
        for task in self._turn.task_weights:
            if task not in losses:
                raise ProblemError(f"training_step's losses: {unknown_name('task', task, losses)}")
        total = sum(weight * losses[task] for task, weight in self._turn.task_weights.items())
        return {**{k: v.detach() if isinstance(v, Tensor) else v for k, v in losses.items()}, "loss": total}

    def _merge(self, trainer: Trainer) -> MergeOutcome:
        assert self._forked is not None
        # Outside of Lightning's inference mode: tensors that are made in it could not be trained.
        with torch.inference_mode(False):
            self.merges.append(self._forked.merge(lambda model: self._score(trainer)))
        self._steps = 0
        return self.merges[-1]

    def _score(self, trainer: Trainer) -> float:
        module = self._module
        assert module is not None
        values = LoggedValues(self.monitor)
        with _logging_to(module, values.log), trainer.precision_plugin.val_step_context():
            module.on_validation_epoch_start()
            for batch, index, loader in _validation_batches(trainer, module):
                values.batch = batch
                module.validation_step(batch, index, *([loader] if loader is not None else []))
            values.batch = None
            module.on_validation_epoch_end()
        value = values.mean()
        return value if self.mode == "max" else -value

    def _release(self) -> None:
        if self._module is not None:
            del self._module.optimizer_step, self._module.training_step
            self._module = None


class LoggedValues:
    """What a module logs under one name while it is validated, as Lightning reduces it: means over examples.

    Args:
        name: The name.

    Attributes:
        batch: The batch that is being looked at.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.batch: Any = None
        self._names: set[str] = set()
        self._values: list[tuple[float, int]] = []
        self._metrics: dict[str, Any] = {}

    def log(self, name: str, value: Any, *_: Any, batch_size: int | None = None, **options: Any) -> None:
        """Stand in for a module's `log`."""
        self._names.add(name)
        if hasattr(value, "compute") and hasattr(value, "reset"):
            self._metrics[name] = value
        elif name == self.name:
            if options.get("reduce_fx", "mean") != "mean":
                raise ProblemError(
                    f"{name!r} is logged with reduce_fx={options['reduce_fx']!r}: log a mean to score by."
                )
            if batch_size is None:
                batch_size = 1 if self.batch is None else _batch_size(self.batch)
            self._values.append((float(value), batch_size))

    def mean(self) -> float:
        """Return the value on all validation data, and let metrics forget what they have seen."""
        computed = float(self._metrics[self.name].compute()) if self.name in self._metrics else None
        for metric in self._metrics.values():
            metric.reset()
        if computed is not None:
            return computed
        if not self._values:
            raise ProblemError(f"monitor: {unknown_name('logged value', self.name, self._names)}")
        return math.fsum(value * size for value, size in self._values) / sum(size for _, size in self._values)


def _check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Refuse, by name, what a run in place cannot do."""
    if not module.automatic_optimization:
        raise ProblemError(
            "ForkMergeCallback runs Lightning's optimizer step once per branch, which manual optimization has none of: "
            "set automatic_optimization = True, or write the loop with fm.fork (see the Fabric example)."
        )
    if len(trainer.optimizers) != 1:
        raise ProblemError(
            f"ForkMergeCallback needs one optimizer, configure_optimizers gave {len(trainer.optimizers)}: put all "
            "parameters into groups of one, or write the loop with fm.fork (see the Fabric example)."
        )
    if trainer.world_size != 1:
        raise ProblemError(
            f"ForkMergeCallback runs on one device, the trainer has {trainer.world_size}: pass devices=1, or write the "
            "loop with fm.fork, wrap every branch's model and average the score over processes."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ProblemError(
            f"ForkMergeCallback gives every branch a step per batch, accumulate_grad_batches is "
            f"{trainer.accumulate_grad_batches}: pass 1 and larger batches, or write the loop with fm.fork."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ProblemError(
            "ForkMergeCallback does not lend Lightning's gradient scaler to branches: pass precision='bf16-mixed' "
            "instead of '16-mixed', or write the loop with fm.fork(…, scaler=…)."
        )
    if not trainer.enable_validation:
        raise ProblemError(
            "ForkMergeCallback scores merges by validation_step on validation batches: give the module one, pass "
            "val_dataloaders to fit, and leave limit_val_batches above 0."
        )


def _validation_batches(trainer: Trainer, module: LightningModule) -> Iterator[tuple[Any, int, int | None]]:
    """Yield every validation batch on its device, with its index and, if there are several loaders, that of its own."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.setup_data()
    loader = loop._combined_loader
    assert loader is not None
    loader.limits = loop.max_batches
    for batch, index, number in loader:
        converted = trainer.precision_plugin.convert_input(batch)
        prepared = module._on_before_batch_transfer(converted, dataloader_idx=number)
        moved = trainer.strategy.batch_to_device(prepared, dataloader_idx=number)
        yield moved, index, number if loop.num_dataloaders > 1 else None


def _batch_size(batch: Any) -> int:
    from lightning.pytorch.utilities.data import extract_batch_size

    return extract_batch_size(batch)


def _log_nothing(*_: Any, **__: Any) -> None:
    """Stand in for the `log` of a module whose numbers nobody asked for."""


@contextmanager
def _logging_to(module: LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Let a module log to a function; `log_dict` calls `log`."""
    module.log = log  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log
