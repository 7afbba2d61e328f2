"""`fit`: the one way any algorithm is run."""

from __future__ import annotations

import copy
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import nn

from forkmerge.algorithms.branches.shared_training import SharedTraining
from forkmerge.algorithms.checkpoint import RunState
from forkmerge.algorithms.events.run_events import OnEvent, RunFinished, RunStarted
from forkmerge.algorithms.events.send import ignore, sending
from forkmerge.algorithms.floor import read_reference
from forkmerge.algorithms.preflight import check_numbers, check_run
from forkmerge.algorithms.resolved_config import advised, environment, open_store, run_config, started_config
from forkmerge.algorithms.rounds import Rounds
from forkmerge.algorithms.run_record import Run
from forkmerge.algorithms.settings import Settings
from forkmerge.engine.executors.branch_execution import open_branches
from forkmerge.engine.executors.branch_worker import TrainingJob
from forkmerge.engine.executors.devices import Devices, place_model
from forkmerge.engine.executors.executor import Executor
from forkmerge.engine.executors.executor_options import ExecutorOptions, executor_options
from forkmerge.engine.storage.atomic_files import check_space, is_unused, safe_name
from forkmerge.engine.storage.run_folder import NoStore, RunFolder
from forkmerge.engine.storage.shared_store import SHARED, SharedStore
from forkmerge.engine.training.interrupts import held_back
from forkmerge.engine.training.memory_format import memory_format
from forkmerge.engine.training.model_binding import ModelBinding, OptimizerFactory
from forkmerge.engine.training.module_checks import check_module
from forkmerge.engine.training.options import Training
from forkmerge.engine.training.torch_compile import compiled
from forkmerge.errors import ProblemError, check_count, unknown_name
from forkmerge.methods import method_from
from forkmerge.problem.definition import Problem
from forkmerge.problem.error_facts import note_moment
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state
from forkmerge.problem.scoring import device_of
from forkmerge.problem.searched_evaluation import searched_by

ModelOrFactory = nn.Module | Callable[[], nn.Module]
P = ParamSpec("P")
R = TypeVar("R")
_running = threading.RLock()  # by a thread, which may run the parts of a whole inside


def one_at_a_time(fit: Callable[P, R]) -> Callable[P, R]:
    """Refuse a `fit` while another thread is inside one: random states and flags of torch are the process's."""

    @wraps(fit)
    def alone(*arguments: P.args, **options: P.kwargs) -> R:
        if not _running.acquire(blocking=False):
            raise ProblemError(
                "another thread of this process is inside fit: both would draw from the same random states, and "
                "neither would have its own bits. Run one after the other, or each in a process of its own; "
                "`forkmerge compare` does that for you."
            )
        try:
            return fit(*arguments, **options)
        finally:
            _running.release()

    return alone


class Algorithm(ABC):
    """Something that turns a problem into a trained model."""

    @abstractmethod
    def settings(self, problem: Problem) -> Settings:
        """Return the fork–merge run that this algorithm is."""

    def resolved(
        self, problem: Problem, model: nn.Module, seed: int, steps: int, started: Mapping[str, Any]
    ) -> Algorithm:
        """Return the algorithm with every option named; `started` are those of the run that is resumed, if any."""
        del problem, model, seed, steps, started
        return self

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
        checkpoint_every: int | None = None,
        on_event: OnEvent = ignore,
        progress: bool = True,
        source: Mapping[str, Any] | None = None,
        rebuild: Callable[[], Problem] | None = None,
        shared: SharedStore | None = None,
        **training: Any,
    ) -> Run:
        """Train and return the run, whose `model` holds the final weights. The test split is never read.

        Args:
            problem: What to learn.
            model: The module, trained in place, or a function that makes it (called under the run's seed).
            optimizer: Makes the optimizer from the model, e.g. `OptimizerOf("Adam", lr=1e-3)`.
            steps: T, the training steps of every branch.
            seed: Of the model's initialisation (where `model` makes it), the data order and all randomness.
            workers: Processes that train branches; 1, the default without devices, trains them here in turn.
            devices: Where they train: worker i on device i modulo their number, one worker each by default. The model
                is moved to the first. None leaves everything on the model's own device.
            executor: Where else branches are trained, e.g. `Ray(workers=4)`, instead of `workers` and `devices` here.
            threads: Threads per branch; None divides torch's number by `workers`. The bits depend on it.
            folder: Where the run is recorded and checkpointed; None keeps nothing on disk.
            resume: Continue the run in `folder`, if there is one, to the same bits.
            checkpoint_every: Steps between checkpoints inside a round; None checkpoints at merges only.
            on_event: Called with every event, e.g. to log it: see `forkmerge.algorithms.events`.
            progress: Show a bar with the time left, where there is a terminal or a notebook to show it.
            source: Where a recipe came from, so that `forkmerge resume` can find it again.
            rebuild: Makes the problem anew in worker processes instead of pickling it.
            shared: What runs on the same training data with the same first weights have in common until their first
                merge: this one takes it from there, or leaves it there; see `fit_targets`. The bits are the same.
            **training: How every branch is trained: options of `forkmerge.Training`, such as `clip_norm=1.0`.
        """
        check_problem(problem)
        check_numbers(steps, seed, threads)
        if checkpoint_every is not None:
            check_count("checkpoint_every", checkpoint_every)
        where = executor_options(executor, workers, devices)
        module = build_model(model, seed)
        place_model(module, where.devices)
        stored = started_config(folder, resume)
        algorithm = self.resolved(problem.sealed(), module, seed, steps, stored["algorithm"])
        settings = algorithm.settings(problem)
        sealed = settings.searched(problem.sealed(), seed)
        if rebuild is not None:
            rebuild = partial(_rebuild_searched, rebuild, settings.search_by, settings.validation_examples, seed)
        options = training_options(optimizer, training, method=method_from(settings.method)).over(steps)
        if settings.keep_branches and folder is None:
            raise ProblemError("keep_branches=True needs a folder to keep them in: pass folder=….")
        threads = threads or stored["training"].get("threads") or where.threads
        channels_last = (
            stored["training"].get("channels_last") if options.channels_last is None else options.channels_last
        )
        check = partial(check_run, sealed, module, options, settings, seed)
        with (
            sending(on_event, progress=progress) as send,
            where.open() as engine,  # whose processes start while the run is checked
            memory_format(module, channels_last, options.precision, check) as is_channels_last,
            compiled(module, options.compile, check),
        ):
            options = replace(options, channels_last=is_channels_last)
            job = TrainingJob(sealed, module, options, seed, threads, rebuild, where.devices)
            config = run_config(algorithm, sealed, module, options, source, steps=steps, seed=seed, threads=threads)
            rounds = partial(Rounds, settings, steps=steps, on_event=send, checkpoint_every=checkpoint_every)
            if shared is not None:
                common = SharedTraining(shared, job, config, environment(threads, device_of(module)))
                rounds = partial(rounds, shared=common)
            return algorithm._run(job, config, rounds, engine, folder, resume, send)

    def fit_targets(
        self,
        problem: Problem,
        targets: Sequence[str],
        *,
        model: ModelOrFactory,
        folder: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> dict[str, Run]:
        """Train for several targets, each with the other tasks as its auxiliaries; return the run of every target.

        Branches that are the same for several targets until the first merge, such as one on all tasks, are trained
        once. After it each target has merges and branches of its own. Every run has the bits, and the record, that it
        would have alone. Call it again with the same folder to continue where it was interrupted.

        Args:
            problem: What to learn; every target needs validation data.
            targets: The targets.
            model: The module, of which every target trains a copy, or a function that makes it.
            folder: Where the runs are kept, each in a folder of its own; None keeps nothing on disk.
            **options: Those of `fit`.
        """
        names = list(dict.fromkeys(targets))
        folders = {name: None if folder is None else Path(folder) / safe_name(name) for name in names}
        if folder is not None and len({str(own).casefold() for own in folders.values()}) < len(names):
            raise ProblemError("some targets have names that would be the same folder: fit them one by one.")
        shared = SharedStore(None if folder is None else Path(folder) / SHARED)
        runs = {}
        for name, own in folders.items():
            module = copy.deepcopy(model) if isinstance(model, nn.Module) else model
            is_begun = own is not None and (own / "config.json").is_file()
            here = {**options, "folder": own, "resume": is_begun, "shared": shared}
            runs[name] = self.fit(problem.with_target(name), model=module, **here)
        shared.clear()
        return runs

    def _run(
        self,
        job: TrainingJob,
        config: dict[str, Any],
        rounds_of: Callable[..., Rounds],
        executor: Executor,
        folder: str | os.PathLike[str] | None,
        resume: bool,
        send: OnEvent,
    ) -> Run:
        facts = environment(job.threads, device_of(job.model))
        with open_branches(job, executor) as execution:  # before the folder: it finds out what cannot be trained
            settings, binding = self.settings(job.problem), execution.binding
            settings.check_descriptors(binding, job.problem, execution.workers)
            if folder is not None and is_unused(Path(folder)):
                check_space(Path(folder), settings.least_disk(binding, job.problem, config["training"]["steps"]))
            store, notes = open_store(folder, resume, config, facts, depth=5)
            with store:
                result = store.result()
                if result is not None:
                    return _finished(result, job.model, store, send)
                rounds = rounds_of(execution=execution, store=store)
                send(_started(self, rounds, folder, resume))
                try:
                    with (
                        advised(folder, config["source"]),
                        held_back(executor.interrupt) if folder is not None else nullcontext(),
                    ):
                        state = rounds.run()
                except BaseException as error:
                    execution.binding.restore_buffers()  # so that the same module can resume
                    note_moment(error, f"validating {job.problem.target!r} {_moment(rounds)}")
                    raise
                state.notes.extend(note for note in (*notes, *store.warnings) if note not in state.notes)
                run = _to_run(type(self).__name__, job.problem.target, rounds.steps, config, facts, state)
                run.reference = rounds.reference or read_reference(store)
                return _complete(run, execution.binding, state, store, send)


def _rebuild_searched(rebuild: Callable[[], Problem], search_by: Any, examples: int | None, seed: int) -> Problem:
    return searched_by(rebuild(), search_by, examples, seed)


def _moment(rounds: Rounds) -> str:
    if not hasattr(rounds, "state"):
        return "in a ranking run"
    return f"in round {rounds.state.round}, after step {rounds.state.step}"


def check_problem(problem: object) -> None:
    """Refuse what is no problem, such as a data set."""
    if not isinstance(problem, Problem):
        raise ProblemError(
            f"fit needs a Problem, got {type(problem).__name__}: say what to learn with fm.Problem(target, streams, "
            "validation), whose streams hold the training data of each task."
        )


def training_options(optimizer: OptimizerFactory, options: Mapping[str, Any], **others: Any) -> Training:
    """Return how branches are trained, from options by name; a name that does not exist is refused."""
    names = [item.name for item in fields(Training) if item.name not in ("optimizer", *others)]
    for name in options:
        if name not in names:
            raise ProblemError(unknown_name("option of fit", name, names))
    return Training(optimizer, **options, **others)


def build_model(model: ModelOrFactory, seed: int) -> nn.Module:
    """Return the module, made under the run's seed where a factory is given."""
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise ProblemError(f"model must be a torch.nn.Module or a function that makes one, got {model!r}.")
        with random_state_kept():
            set_random_state(derive(seed, "model"))
            model = model()
    check_module(model)
    return model


def _to_run(name: str, target: str, steps: int, config: dict[str, Any], facts: dict[str, Any], state: RunState) -> Run:
    selection = state.selection
    assert selection is not None
    final = selection.final or "refit"
    if state.rounds and len(state.rounds[0].branches) == 1 and final in ("last merge", "best merge"):
        final = final.replace("merge", "step") if final == "last merge" else "best validation"
    phases = dict.fromkeys(phase for each in state.rounds for phase in each.seconds)
    seconds = {phase: sum(each.seconds.get(phase, 0.0) for each in state.rounds) for phase in phases}
    return Run(
        algorithm=name,
        target=target,
        steps=steps,
        seed=config["training"]["seed"],
        score=selection.score,
        metrics=selection.metrics,
        final=final,
        rounds=state.rounds,
        probes=state.probes,
        notes=state.notes,
        trained_steps=state.trained_steps,
        settings={key: config[key] for key in ("algorithm", "problem", "training", "model")},
        seconds=seconds,
        environment=facts,
    )


def _complete(run: Run, binding: ModelBinding, state: RunState, store: RunFolder | NoStore, send: OnEvent) -> Run:
    for branch in state.branches:  # whoever still holds them: their memory goes to the model's own
        branch.rows, branch.optimizer_rows = {}, {}
    binding.release(state.merged)
    run.model = binding.model
    store.record({"event": "end", "final": run.final, "score": run.score})
    store.finish(run.to_json(), binding.model.state_dict())
    send(finished_event(run))
    return run


def _finished(result: dict[str, Any], module: nn.Module, store: RunFolder | NoStore, send: OnEvent) -> Run:
    """Return a run that had already ended, its weights loaded into the module."""
    run = Run.from_json(result)
    module.load_state_dict(store.model_tensors())
    run.model, run.reference = module, read_reference(store)
    send(finished_event(run))
    return run


def finished_event(run: Run) -> RunFinished:
    """Return the event that tells of a run's end."""
    seconds, metrics = dict(run.seconds), dict(run.metrics)
    return RunFinished(final=run.final, step=run.steps, score=run.score, metrics=metrics, seconds=seconds)


def _started(algorithm: Algorithm, rounds: Rounds, folder: str | os.PathLike[str] | None, resume: bool) -> RunStarted:
    return RunStarted(
        algorithm=type(algorithm).__name__,
        target=rounds.target,
        seed=rounds.job.seed,
        steps=rounds.steps,
        rounds=math.ceil(rounds.steps / rounds.interval),
        refit=rounds.settings.refit,
        folder=None if folder is None else str(folder),
        is_resumed=resume,
    )
