"""One run of a comparison: a method on a target with a seed, from plain data to its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forkmerge.algorithms.branches.round_sizes import branch_count
from forkmerge.algorithms.composed import is_started
from forkmerge.algorithms.events.run_events import Event, RunResumed, RunStarted, StepProgress
from forkmerge.algorithms.measure_test_split import measure_test
from forkmerge.algorithms.run_record import Round, Run
from forkmerge.engine.executors.devices import on_own_device
from forkmerge.engine.executors.executor import Tell
from forkmerge.engine.executors.parallel_calls import using_threads
from forkmerge.engine.storage.json_codec import plain
from forkmerge.engine.storage.shared_store import SHARED, SharedStore
from forkmerge.experiments.compared_methods import compared_method_from, with_setting
from forkmerge.experiments.cost_of_run import estimate_run
from forkmerge.experiments.recipe import Recipe, data_key, recipe_from
from forkmerge.experiments.run_results import RunResult
from forkmerge.methods import GramianMethod, MatrixMethod
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state

_SECONDS_BETWEEN_NEWS = 0.5


@dataclass(frozen=True)
class ComparisonRun:
    """What a worker process needs to do one run; plain data, so that it is cheap to send.

    Args:
        source: Where the recipe comes from, target and seed included.
        out: The comparison's folder.
        record: The run's record, still without its results.
        refit: Whether to train on training ∪ validation data.
        weighs: Whether to find out how much memory the run takes.
        work: Its training steps over all branches, for estimates of the time left.
        shares: Whether other runs of the comparison may train alike until their first merge.
    """

    source: Mapping[str, Any]
    out: str
    record: RunResult
    refit: bool
    weighs: bool
    work: int
    shares: bool = False

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.out) / self.record.folder


def do_comparison_run(job: ComparisonRun, tell: Tell) -> RunResult:
    """Do a run, or continue it, and return its record; the test split is read once, after the fit.

    One thread, because the bits depend on it and several runs share the machine.
    """
    record = job.record
    with random_state_kept(), using_threads(1):
        recipe = prepare(job)
        folder = job.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        options = {"steps": recipe.steps, **recipe.options, "seed": record.seed, "workers": 1, "threads": 1}
        run = recipe.algorithm.fit(
            recipe.problem,
            model=recipe.model,
            optimizer=recipe.optimizer,
            folder=folder,
            resume=is_started(folder),
            on_event=_Meter(tell),
            progress=False,
            shared=SharedStore(Path(job.out) / SHARED / data_key(job.source)) if job.shares else None,
            **on_own_device(options),
        )
        if record.kind == "final":
            measure_test(run, recipe.problem, folder)
        return replace(record, **_results(recipe, run, job))


def prepare(job: ComparisonRun) -> Recipe:
    """Return a run's recipe; a model or data that its function draws at random depend on the seed alone."""
    set_random_state(derive(job.record.seed, "recipe"))
    recipe = recipe_from(job.source)
    method = compared_method_from(job.record.method)
    return with_setting(method.prepare(recipe, refit=job.refit), job.record.setting)


def _results(recipe: Recipe, run: Run, job: ComparisonRun) -> dict[str, Any]:
    problem = recipe.problem
    evaluation, split, metrics = problem.target_validation, "validation", run.metrics
    if run.test is not None:
        split = "held out" if "hold_out" in recipe.source["settings"] else "test"
        evaluation, metrics = problem.evaluations("test")[problem.target], run.test
    memory = None
    if job.weighs:
        options = on_own_device({**recipe.options, "seed": job.record.seed, "threads": 1})
        seeded = replace(recipe, options=options)
        memory = _memory(seeded)
    return {
        "split": split,
        "metrics": plain(metrics),
        "directions": evaluation.directions,
        "validation": plain(run.metrics),
        "branches": branch_count(recipe.algorithm, problem),
        "steps": recipe.steps,
        "seconds": sum(run.seconds.values()),
        "memory": memory,
        "phases": dict(run.seconds),
        "rounds": plain([_round(each) for each in run.searched]),
        "relevance": plain(run.relevance) if len(run.relevance) > 1 else {},
        "notes": run.notes,
    }


def _round(round_record: Round) -> dict[str, Any]:
    short: dict[str, Any] = {"end": round_record.end, "score": round_record.score, "metrics": round_record.metrics}
    if len(round_record.branches) > 1:
        short["coefficients"] = round_record.coefficients
        short["branches"] = {name: branch.score for name, branch in round_record.branches.items()}
    return short


def _memory(recipe: Recipe) -> float | None:
    """Model sizes of all states, gradients and gradient matrices of a run; None if it cannot be tried out."""
    try:
        cost = estimate_run(recipe, workers=1)
    except Exception:  # a figure beside the result must not cost the result
        return None
    sizes = cost.memory["total"] / cost.memory["gradients"]
    if isinstance(recipe.algorithm.settings(recipe.problem).method, GramianMethod | MatrixMethod):
        sizes += max(sum(weight > 0 for weight in branch.task_weights.values()) for branch in cost.branches)
    return sizes


class _Meter:
    """Tells now and then how many steps a run has trained."""

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self.tell, self.clock = tell, clock
        self.steps, self.told = 0, clock()
        self._at: dict[tuple[str, str], int] = {}
        self._from = 0  # where a resumed run goes on

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted | RunResumed):
            self._at = {}
            self._from = event.step if isinstance(event, RunResumed) else 0
        if not isinstance(event, StepProgress):
            return
        key = (event.phase, event.branch)
        self.steps += max(event.step - self._at.get(key, self._from), 0)
        self._at[key] = event.step
        if self.clock() - self.told >= _SECONDS_BETWEEN_NEWS:
            self.told = self.clock()
            self.tell(self.steps)
