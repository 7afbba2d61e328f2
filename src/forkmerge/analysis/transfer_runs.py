"""The training runs that analyses need: one auxiliary beside the target at one λ, with one seed.

A run is plain data, so that it can be sent to a worker process; what it gives is plain data, so that it can be
written down and need not be done again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from forkmerge.algorithms import Algorithm, ForkMerge, Joint, SingleTask
from forkmerge.algorithms.mixtures import ALONE
from forkmerge.algorithms.run_record import Run
from forkmerge.analysis.heldout import confidence_discrepancy, heldout_loss, reads_heldout
from forkmerge.engine.executors.executor import Tell
from forkmerge.engine.executors.parallel_calls import Failure, run_calls, using_threads
from forkmerge.engine.storage.records import Record
from forkmerge.engine.training.optimizers import SchedulerOf
from forkmerge.engine.training.options import Mixture
from forkmerge.errors import ProblemError, unknown_name
from forkmerge.experiments.recipe import Recipe, seeded_recipe
from forkmerge.problem.definition import Problem
from forkmerge.problem.randomness import random_state_kept
from forkmerge.problem.scoring import measure

Recipes = Callable[[int], Recipe]
"""From a seed to a recipe whose target is set; for worker processes it must pickle, as `SeededSource` does."""

Maker = Callable[[Recipe, str, float], Algorithm]
"""From (recipe, auxiliary, λ) to the algorithm whose transfer gain is measured."""

EVERY = ":all"
"""Stands for all auxiliaries at once, where a run names one; no task can have this name."""


@dataclass(frozen=True)
class SeededSource:
    """The recipes of a TOML file or `module:function`, by seed.

    Args:
        source: Of a recipe, as `load_recipe` gave it.
        target: The target task.
    """

    source: Mapping[str, Any]
    target: str

    def __call__(self, seed: int) -> Recipe:
        """Return the recipe of a seed; data or weights that its function draws depend on the seed alone."""
        return seeded_recipe(self.source, seed, self.target)


def equal_weights(recipe: Recipe, auxiliary: str, weight: float, method: str | None = None) -> Algorithm:
    """Return joint training with {target: 1, auxiliary: λ}, its tasks combined by `method`."""
    weights = {recipe.problem.target: 1.0, **dict.fromkeys(_named(recipe.problem, auxiliary), weight)}
    return Joint(weights, method=method, **recipe.shared_options)


def single_task(recipe: Recipe) -> SingleTask:
    """Return training on the target alone, which gains are measured against."""
    return SingleTask(**recipe.shared_options)


def forkmerge(recipe: Recipe, auxiliary: str, weight: float) -> Algorithm:
    """Return the recipe's ForkMerge with two branches, the target alone and with the auxiliary at λ.

    With `EVERY` there is one branch per auxiliary. A search that cannot serve so many gives way to the default, and
    reference metrics that are not the target's to those of its own branch.
    """
    target, own = recipe.problem.target, recipe.algorithm
    branches = [Mixture(ALONE, {target: 1.0})]
    branches += [Mixture(task, {target: 1.0, task: weight}) for task in _named(recipe.problem, auxiliary)]
    reference = own.reference if isinstance(own, ForkMerge) else None
    is_its_own = set(reference or ()) == set(recipe.problem.target_validation.directions)
    return recipe.forkmerge(branches, len(branches), reference=reference if is_its_own else None, refit=False)


def _named(problem: Problem, auxiliary: str) -> tuple[str, ...]:
    if auxiliary == EVERY:
        return problem.auxiliaries
    if auxiliary not in problem.auxiliaries:
        raise ProblemError(unknown_name("auxiliary task", auxiliary, problem.auxiliaries))
    return (auxiliary,)


@dataclass(frozen=True)
class TransferRun:
    """One training run.

    Args:
        recipes: Where its recipe comes from.
        seed: Its seed.
        auxiliary: The auxiliary; empty for single-task training.
        weight: λ.
        steps: Training steps; the recipe's own where None.
        maker: The algorithm.
        label: The algorithm's name.
        test: Whether to measure the test split, after the fit.
    """

    recipes: Recipes
    seed: int
    auxiliary: str = ""
    weight: float = 0.0
    steps: int | None = None
    maker: Maker = equal_weights
    label: str = "equal weights"
    test: bool = False

    @property
    def name(self) -> str:
        """What tells it from the others of an analysis."""
        what = f"{self.label}:{self.auxiliary}:{self.weight:g}" if self.auxiliary else ALONE
        return f"{what}:seed{self.seed}" + ("" if self.steps is None else f":{self.steps}")


@dataclass(frozen=True)
class TransferRunResult(Record):
    """What a run gave.

    Args:
        auxiliary: The auxiliary; empty for single-task training.
        weight: λ.
        seed: The seed.
        steps: Training steps.
        metrics: `{split: {metric: value}}` of the target.
        directions: +1 or −1 by metric.
        loss: The target's loss on validation examples; None where its stream cannot read them.
        discrepancy: `{split: CSD}`; empty where predictions are no class scores.
        relevance: λ of every task, mean over merges; empty where nothing was merged.
        coefficients: Λ of every merge.
        seconds: Wall time.
    """

    auxiliary: str
    weight: float
    seed: int
    steps: int
    metrics: dict[str, dict[str, float]]
    directions: dict[str, int]
    loss: float | None
    discrepancy: dict[str, float]
    relevance: dict[str, float] = field(default_factory=dict)
    coefficients: tuple[dict[str, float], ...] = ()
    seconds: float = 0.0


def do_transfer_run(transfer_run: TransferRun, tell: Tell = lambda value: None) -> TransferRunResult:
    """Train, and measure what came out; one thread, because the bits depend on it and several runs share cores."""
    started = time.perf_counter()
    with random_state_kept(), using_threads(1):
        recipe = transfer_run.recipes(transfer_run.seed)
        problem = recipe.problem
        run = fit_transfer_run(transfer_run, recipe)
        metrics, discrepancy, loss = _measured(run, problem, transfer_run)
    merged = len(run.rounds[0].branches) > 1 if run.rounds else False
    return TransferRunResult(
        auxiliary=transfer_run.auxiliary,
        weight=transfer_run.weight,
        seed=transfer_run.seed,
        steps=run.steps,
        metrics=metrics,
        directions=problem.target_validation.directions,
        loss=loss,
        discrepancy=discrepancy,
        relevance=dict(run.relevance) if merged else {},
        coefficients=tuple(run.coefficients) if merged else (),
        seconds=time.perf_counter() - started,
    )


def fit_transfer_run(run: TransferRun, recipe: Recipe) -> Run:
    """Train a model with the recipe's own options; validation labels are never trained on."""
    recipe = shortened(recipe, run.steps)
    algorithm = run.maker(recipe, run.auxiliary, run.weight) if run.auxiliary else single_task(recipe)
    options = {"steps": recipe.steps, **recipe.options, "seed": run.seed, "workers": 1, "threads": 1}
    return algorithm.fit(recipe.problem, model=recipe.model, optimizer=recipe.optimizer, progress=False, **options)


def shortened(recipe: Recipe, steps: int | None) -> Recipe:
    """Return a recipe of so many steps, with as many rounds as before."""
    if steps is None or steps == recipe.steps:
        return recipe
    intervals = {name: getattr(recipe.algorithm, name, None) for name in ("interval", "validate_every")}
    shorter = {
        name: max(round(value * steps / recipe.steps), 1) for name, value in intervals.items() if value is not None
    }
    algorithm: Algorithm = replace(recipe.algorithm, **shorter) if shorter else recipe.algorithm  # type: ignore[type-var]
    return replace(recipe, steps=steps, algorithm=algorithm)


def halfway(recipe: Recipe, steps: int) -> Recipe:
    """Return the first half of the target's own training of so many steps, at the rates that the whole of it has."""
    options = dict(recipe.options)
    if isinstance(options.get("scheduler"), SchedulerOf):
        options["scheduler"] = options["scheduler"].over(steps)
    return replace(recipe, steps=max(steps // 2, 1), algorithm=SingleTask(), options=options)


def _measured(
    run: Run, problem: Problem, transfer_run: TransferRun
) -> tuple[dict[str, dict[str, float]], dict[str, float], float | None]:
    assert run.model is not None
    evaluations = {"validation": problem.target_validation}
    if transfer_run.test and problem.target in problem.evaluations("test"):
        evaluations["test"] = problem.evaluations("test")[problem.target]
    metrics, discrepancy = {}, {}
    for split, evaluation in evaluations.items():
        metrics[split] = measure(run.model, evaluation, seed=transfer_run.seed)
        with suppress(ProblemError):  # predictions that are no class scores have no confidence of their own
            discrepancy[split] = confidence_discrepancy(run.model, evaluation, seed=transfer_run.seed)
    readable = reads_heldout(run.model, problem, transfer_run.seed)
    return metrics, discrepancy, heldout_loss(run.model, problem, seed=transfer_run.seed) if readable else None


def do_transfer_runs(runs: Sequence[TransferRun], workers: int = 1) -> list[TransferRunResult]:
    """Do runs in worker processes, of one thread each; the results do not depend on their number."""
    results: dict[int, TransferRunResult] = {}
    for index, result in run_calls(do_transfer_run, runs, workers):
        if isinstance(result, Failure):
            raise ProblemError(f"the run {runs[index].name!r} of the analysis failed: {result.error}")
        results[index] = result
    return [results[index] for index in range(len(runs))]
