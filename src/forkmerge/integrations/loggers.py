"""The numbers of a run in TensorBoard, Weights & Biases or MLflow: callbacks for `fit(on_event=…)`.

What is logged, and under which names, is `forkmerge.algorithms.events.scalars`; a logger here only brings it away.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from forkmerge.algorithms.events import Event, PhaseStarted, ProbeScored, RunFinished, RunResumed, scalars
from forkmerge.algorithms.events.run_events import InPhase
from forkmerge.errors import check_packages

Self = TypeVar("Self", bound="Logger")

STEP_AXIS = "training_step"
"""The axis that W&B draws over: branches report the same step one after another, and its own steps only rise."""


class Logger(ABC):
    """A callback for `on_event` that writes numbers somewhere; `with` closes it, also when `fit` fails."""

    def __call__(self, event: Event) -> None:
        """Write the numbers of an event."""
        step, values = scalars(event)
        if values:
            self.write(event, step, values)

    @abstractmethod
    def write(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        """Write what `scalars` made of an event."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Write what is still waiting; nothing can be logged afterwards."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, frames: TracebackType | None) -> None:
        self.close(failed=kind is not None)


class TensorBoard(Logger):
    """Writes event files for TensorBoard.

    A resumed run with the same folder goes on there, and what an interrupted one had told of later steps is purged. A
    refit, ranking runs and the parts of a composed algorithm count steps of their own, so each has its own subfolder,
    which TensorBoard shows as a run.

    Args:
        folder: Where the event files are written.

    Note:
        `tensorboard --logdir FOLDER` shows them.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_packages("TensorBoard", "tensorboard", {"tensorboard": "tensorboard"})
        self.folder = Path(folder)
        self._writers: dict[Path, Any] = {}

    def __call__(self, event: Event) -> None:
        """Write the numbers of an event; where a phase begins or goes on, purge what was told of later steps."""
        if isinstance(event, PhaseStarted):
            self._open(event, purge_step=0)
        elif isinstance(event, RunResumed):
            # Branches may have got to different steps. The furthest counts: what the others tell again is the same.
            self._open(event, purge_step=max(event.step, *event.steps.values(), 0) + 1)
        super().__call__(event)
        if isinstance(event, RunFinished):
            for writer in self._writers.values():
                writer.flush()

    def write(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve."""
        writer = self._writers.get(self._subfolder(event)) or self._open(event, purge_step=None)
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def close(self, *, failed: bool = False) -> None:
        """Close the event files."""
        while self._writers:
            self._writers.popitem()[1].close()

    def _subfolder(self, event: Event) -> Path:
        is_refit = isinstance(event, InPhase) and event.phase == "refit"
        axis = "refit" if is_refit else "probes" if isinstance(event, ProbeScored) else ""
        return self.folder / event.part / axis

    def _open(self, event: Event, purge_step: int | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        folder = self._subfolder(event)
        if folder in self._writers:
            self._writers.pop(folder).close()
        self._writers[folder] = SummaryWriter(str(folder), purge_step=purge_step)
        return self._writers[folder]


class WandB(Logger):
    """Writes to a run of Weights & Biases, whose curves are drawn over `training_step`.

    A resumed run goes on in the same W&B run if it has the same `id`. W&B deletes nothing: what an interrupted run had
    told of later steps then stands there twice, at the same `training_step` and with the same numbers.

    Args:
        id: Name of the W&B run, the same whenever this run is resumed; None makes a new one.
        options: What `wandb.init` is called with, e.g. `project="…"`, `mode="offline"`.
    """

    def __init__(self, id: str | None = None, **options: Any) -> None:
        check_packages("WandB", "wandb", {"wandb": "wandb"})
        import wandb

        self.run = wandb.init(id=id, **{"project": "forkmerge", "resume": "allow", **options})
        self.run.define_metric(STEP_AXIS, hidden=True)
        self.run.define_metric("*", step_metric=STEP_AXIS)

    def write(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        """Add a row to the history."""
        self.run.log({STEP_AXIS: step, **values})

    def close(self, *, failed: bool = False) -> None:
        """Finish the W&B run."""
        self.run.finish(exit_code=int(failed))


class MLflow(Logger):
    """Writes to a run of MLflow.

    A resumed run goes on in the same MLflow run if it has the same `run_id`: what an interrupted one had told of later
    steps is there already, with the same numbers, and is not written again. Names hold letters, digits and `_-./` and
    spaces; any other character becomes its code, `+` becomes `_2b_`.

    Args:
        run_id: An earlier run to go on with; None begins a new one, whose name is then in this attribute.
        experiment: The experiment that a new run is one of; made if there is none of that name.
        tracking_uri: MLflow's store, e.g. "sqlite:///mlflow.db" (with all of mlflow installed) or a server's address;
            None leaves that to MLflow's own settings.
    """

    def __init__(
        self, run_id: str | None = None, *, experiment: str = "forkmerge", tracking_uri: str | None = None
    ) -> None:
        check_packages("MLflow", "mlflow", {"mlflow-skinny": "mlflow"})
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=tracking_uri)
        self._is_new = run_id is None
        if run_id is None:
            existing = self.client.get_experiment_by_name(experiment)
            number = self.client.create_experiment(experiment) if existing is None else existing.experiment_id
            run_id = self.client.create_run(number).info.run_id
        else:
            self.client.update_run(run_id, status="RUNNING")
        self.run_id: str = run_id
        self._written: dict[str, set[int]] = {}  # steps by name; what is not in it yet is asked for

    def write(self, event: Event, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every metric that has none at this step."""
        from mlflow.entities import Metric

        now, points = int(time.time() * 1000), []
        for name, value in values.items():
            key = _mlflow_name(name)
            if step not in self._steps(key):
                points.append(Metric(key, value, now, step))
                self._steps(key).add(step)
        if points:
            self.client.log_batch(self.run_id, metrics=points)

    def close(self, *, failed: bool = False) -> None:
        """Set the status of the MLflow run."""
        self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")

    def _steps(self, key: str) -> set[int]:
        if key not in self._written:
            points = [] if self._is_new else self.client.get_metric_history(self.run_id, key)
            self._written[key] = {point.step for point in points}
        return self._written[key]


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w./ -]", lambda match: f"_{ord(match[0]):x}_", name)
