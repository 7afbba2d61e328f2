"""Algorithms made of whole runs of others: each part has its own folder inside the run's, and resumes by itself."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from forkmerge.algorithms.events.run_events import OnEvent, RunStarted
from forkmerge.algorithms.events.send import check_callback, ignore, in_part, sending
from forkmerge.algorithms.fit import (
    Algorithm,
    ModelOrFactory,
    build_model,
    check_problem,
    finished_event,
    one_at_a_time,
    training_options,
)
from forkmerge.algorithms.preflight import check_numbers
from forkmerge.algorithms.resolved_config import environment, open_store, run_config, started_config
from forkmerge.algorithms.run_record import Round, Run
from forkmerge.engine.executors.devices import Devices
from forkmerge.engine.executors.executor_options import ExecutorOptions, executor_options
from forkmerge.engine.storage.run_folder import NoStore, RunFolder
from forkmerge.engine.training.model_binding import OptimizerFactory
from forkmerge.problem.definition import Problem
from forkmerge.problem.metrics import Criterion
from forkmerge.problem.scoring import device_of


@dataclass
class Parts:
    """What the parts of a composed run share, and how one of them is run.

    Args:
        problem: What to learn.
        model: The module or the function that makes it, as `fit` got it.
        module: The module, not trained yet; the composed run leaves its result there.
        optimizer: Makes the optimizer.
        steps: T of the whole.
        seed: The seed of the whole.
        executor: Where branches, or whole parts, run.
        threads: Threads of each.
        options: Further options of `fit`.
        on_event: Called with every event.
        rebuild: Makes the problem anew in worker processes.
        store: The folder of the whole.
        runs: The parts that have ended, by name.
    """

    problem: Problem
    model: ModelOrFactory
    module: nn.Module
    optimizer: OptimizerFactory
    steps: int
    seed: int
    executor: ExecutorOptions
    threads: int
    options: dict[str, Any]
    on_event: OnEvent
    rebuild: Callable[[], Problem] | None
    store: RunFolder | NoStore
    runs: dict[str, Run] = field(default_factory=dict)

    def run(self, name: str, algorithm: Algorithm, *, model: ModelOrFactory, **options: Any) -> Run:
        """Run a part, or continue it, or return it if it has ended."""
        folder = self.folder(name)
        common = {"optimizer": self.optimizer, "steps": self.steps, "seed": self.seed, "executor": self.executor}
        run = algorithm.fit(
            self.problem,
            model=model,
            folder=folder,
            resume=is_started(folder),
            threads=self.threads,
            on_event=in_part(name, self.on_event),
            progress=False,
            rebuild=self.rebuild,
            **{**self.options, **common, **options},
        )
        self.finish(name, run)
        return run

    def finish(self, name: str, run: Run) -> None:
        """Note that a part has ended."""
        self.runs[name] = run
        self.store.record({"event": "part", "name": name, "score": run.score, "metrics": run.metrics})

    def folder(self, name: str) -> Path | None:
        """Where a part is kept."""
        return self.store.path / name if isinstance(self.store, RunFolder) else None


def is_started(folder: str | os.PathLike[str] | None) -> bool:
    """Whether there is something to resume; a kill at the very beginning leaves a folder that holds nothing yet."""
    return folder is not None and (Path(folder) / "config.json").is_file()


class Composed(Algorithm):
    """An algorithm made of whole runs of others.

    Attributes:
        result: What `fit` returns.
    """

    result: ClassVar[type[Run]] = Run

    @abstractmethod
    def compose(self, parts: Parts) -> Run:
        """Run the parts, leave the final weights in `parts.module`, and return the run as far as it is known here."""

    @abstractmethod
    def branch_steps(self, problem: Problem, steps: int) -> int:
        """Return the training steps of all parts together."""

    @one_at_a_time
    def fit(
        self,
        problem: Problem,
        *,
        model: ModelOrFactory,
        optimizer: OptimizerFactory,
        steps: int,
        seed: int = 0,
        workers: int | None = None,
        devices: Devices | None = None,
        executor: ExecutorOptions | None = None,
        threads: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        resume: bool = False,
        on_event: OnEvent = ignore,
        progress: bool = True,
        source: Mapping[str, Any] | None = None,
        rebuild: Callable[[], Problem] | None = None,
        **options: Any,
    ) -> Run:
        """Train and return the run; see `Algorithm.fit`. Parts are kept in subfolders of `folder`."""
        check_problem(problem)
        check_numbers(steps, seed, threads)
        check_callback(on_event)
        where = executor_options(executor, workers, devices)
        module, sealed, resume = build_model(model, seed), problem.sealed(), resume and is_started(folder)
        self.branch_steps(sealed, steps)  # refuses what cannot be divided into parts before anything is written
        stored = started_config(folder, resume)["training"]
        threads = threads or stored.get("threads") or where.threads
        own = {name: value for name, value in options.items() if name not in ("checkpoint_every", "shared")}
        training = training_options(optimizer, own, method=None)
        config = run_config(self, sealed, module, training, source, steps=steps, seed=seed, threads=threads)
        facts = environment(threads, device_of(module))
        store, notes = open_store(folder, resume, config, facts)
        with store, sending(on_event, progress=progress) as send, where.connected():
            result = store.result()
            if result is not None:
                return self._finished(result, module, store, send)
            send(self._started(sealed, steps, seed, folder, resume))
            store.load()  # nothing is kept there, but this empties the record, which is now written anew
            store.record({"event": "start", "target": problem.target, "seed": seed, "steps": steps, "branches": []})
            parts = Parts(sealed, model, module, optimizer, steps, seed, where, threads, options, send, rebuild, store)
            run = self.compose(parts)
            run = replace(
                run,
                settings={key: config[key] for key in ("algorithm", "problem", "training", "model")},
                environment=facts,
                notes=[*notes, *run.notes],
            )
            run.model = module
            store.record({"event": "end", "final": run.final, "score": run.score})
            store.finish(run.to_json(), module.state_dict())
            send(finished_event(run))
            return run

    def _started(
        self, problem: Problem, steps: int, seed: int, folder: str | os.PathLike[str] | None, resume: bool
    ) -> RunStarted:
        settings = self.settings(problem)
        return RunStarted(
            algorithm=type(self).__name__,
            target=problem.target,
            seed=seed,
            steps=steps,
            rounds=math.ceil(steps / settings.interval_of(steps)),
            refit=settings.refit,
            folder=None if folder is None else str(folder),
            is_resumed=resume,
            branch_steps=self.branch_steps(problem, steps),
        )

    def _finished(self, result: Mapping[str, Any], module: nn.Module, store: RunFolder | NoStore, send: OnEvent) -> Run:
        run = self.result.from_json(result)
        module.load_state_dict(store.model_tensors())
        run.model = module
        send(finished_event(run))
        return run


def whole(algorithm: Algorithm, parts: Parts, last: Run, **changes: Any) -> Run:
    """Return the run that is the last of its parts, at the cost of all of them."""
    details: dict[str, Any] = {
        "algorithm": type(algorithm).__name__,
        "steps": parts.steps,
        "seed": parts.seed,
        "seconds": add_seconds(parts.runs.values()),
        "notes": _notes(parts.runs),
        "model": parts.module,
    }
    return replace(last, **{**details, **changes})


def _notes(runs: Mapping[str, Run]) -> list[str]:
    """Return the notes of all parts, each once, with the parts that have it."""
    parts: dict[str, list[str]] = {}
    for name, run in runs.items():
        for note in run.notes:
            parts.setdefault(note, []).append(name)
    return [f"{names[0] if len(names) == 1 else f'{len(names)} parts'}: {note}" for note, names in parts.items()]


def add_seconds(runs: Iterable[Run]) -> dict[str, float]:
    """Add up the time of several runs, by phase."""
    seconds: dict[str, float] = {}
    for run in runs:
        for phase, value in run.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    return seconds


def follow(first: Sequence[Round], second: Sequence[Round], steps: int) -> list[Round]:
    """Return the rounds of two runs of which the second began after `steps` steps of the first."""
    shifted = [
        replace(r, index=r.index + len(first), start=r.start + steps, end=r.end + steps, branches=_shift(r, steps))
        for r in second
    ]
    return [*first, *shifted]


def _shift(r: Round, steps: int) -> dict[str, Any]:
    return {name: replace(branch, entered_step=branch.entered_step + steps) for name, branch in r.branches.items()}


def comparable_scores(
    directions: Mapping[str, int], metrics: Sequence[Mapping[str, float]], reference: int = 0
) -> list[float]:
    """Return one score per set of metrics, all against the same reference where there are several metrics.

    The score inside a run is relative to that run's own first round, so scores of several runs do not compare.

    Args:
        directions: +1 or −1 per metric.
        metrics: The metrics of every run.
        reference: Position of the run that several metrics are compared with; the first usable one if it is not.
    """
    criterion = Criterion(directions)
    if criterion.needs_reference:
        usable = (values for values in (metrics[reference], *metrics) if _is_reference(values, criterion.directions))
        criterion = criterion.with_reference(next(usable, metrics[reference]))
    return [criterion.score(values) for values in metrics]


def _is_reference(values: Mapping[str, float], names: Iterable[str]) -> bool:
    return all(math.isfinite(values[name]) and values[name] != 0 for name in names)
