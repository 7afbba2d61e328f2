"""What a comparison would do and cost, found out before it starts: `forkmerge compare --dry-run`.

Two steps of every method are trained on the first target, on copies; nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forkmerge.algorithms.fit import build_model
from forkmerge.algorithms.table_data import Cell, Column, Table
from forkmerge.engine.executors.parallel_calls import using_threads
from forkmerge.errors import ConfigError, ForkMergeError
from forkmerge.experiments.compared_methods import ComparedMethod, branch_count, with_setting
from forkmerge.experiments.comparison import Comparison, settings_of
from forkmerge.experiments.comparison_run import workload
from forkmerge.experiments.cost_of_run import estimate_run
from forkmerge.experiments.pretraining import Pretrained, Pretraining, content_key, first_model, is_done, load_part
from forkmerge.experiments.recipe import Recipe, recipe_from, source_for
from forkmerge.experiments.units import show_bytes, show_seconds
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state


@dataclass(frozen=True)
class ComparedMethodCost:
    """What the runs of one method would cost.

    Args:
        method: The method's word.
        label: Its name in tables.
        branches: B on the first target.
        runs: Runs that are reported.
        tuning_runs: Runs that help to choose a setting.
        steps: Training steps of all of them, over all branches.
        seconds: Their time, one after the other.
        memory: Bytes of one run's tensors; activations and data come on top.
    """

    method: str
    label: str
    branches: int
    runs: int
    tuning_runs: int
    steps: int
    seconds: float
    memory: int


@dataclass(frozen=True)
class PretrainingCost:
    """What the pre-training would cost.

    Args:
        recipe: What it is done on.
        steps: Its steps.
        seconds: Its time; 0 where the weights are at hand.
        is_done: Whether the weights are at hand.
    """

    recipe: str
    steps: int
    seconds: float
    is_done: bool


@dataclass(frozen=True)
class ComparisonCost:
    """What a comparison would do and cost.

    Args:
        methods: Every method.
        targets: The target tasks.
        seeds: The seeds.
        workers: Processes.
        runs: All runs, those of tuning included.
        steps: Training steps of all of them, over all branches.
        seconds: The time with that many processes, pre-training included.
        memory: Bytes with that many of the largest runs at once; activations and data come on top.
        pretraining: What is trained before, if anything.
    """

    methods: list[ComparedMethodCost]
    targets: list[str]
    seeds: list[int]
    workers: int
    runs: int
    steps: int
    seconds: float
    memory: int
    pretraining: PretrainingCost | None = None


def estimate_comparison(comparison: Comparison, workers: int) -> ComparisonCost:
    """Return what a comparison would do and cost, refusing what its runs would refuse.

    Args:
        comparison: What is compared.
        workers: Processes, of one thread each.
    """
    seed = comparison.seeds[0]
    with random_state_kept(), using_threads(1):
        recipe = _aimed(comparison.recipe, comparison.targets[0], seed)
        before = _pretraining(recipe)
        methods = [_method(comparison, recipe, method) for method in comparison.methods]
    one_by_one, longest = sum(m.seconds for m in methods), max(m.seconds / (m.runs + m.tuning_runs) for m in methods)
    runs = sum(m.runs + m.tuning_runs for m in methods)
    return ComparisonCost(
        methods=methods,
        targets=list(comparison.targets),
        seeds=list(comparison.seeds),
        workers=workers,
        runs=runs,
        steps=sum(m.steps for m in methods),
        seconds=max(one_by_one / workers, longest) + (before.seconds if before else 0.0),
        memory=sum(sorted((m.memory for m in methods for _ in range(m.runs)), reverse=True)[:workers]),
        pretraining=before,
    )


def _aimed(recipe: Recipe, target: str, seed: int) -> Recipe:
    """Return the recipe as a run of that target and seed gets it."""
    set_random_state(derive(seed, "recipe"))
    made = recipe_from(source_for(recipe.source, seed, target))
    return replace(made, options={**made.options, "seed": seed, "threads": 1, "workers": 1})


def _method(comparison: Comparison, recipe: Recipe, method: ComparedMethod) -> ComparedMethodCost:
    prepared, settings = method.prepare(recipe, refit=comparison.equal_labels), settings_of(comparison, method)
    try:
        plan = estimate_run(with_setting(prepared, settings[0]))
    except ForkMergeError as error:
        raise ConfigError(f"{method.label} on {recipe.problem.target!r}: {error}") from None
    final = _steps(comparison, recipe, method, settings[:1], refit=comparison.equal_labels) * len(comparison.seeds)
    tuning = 0
    if len(settings) > 1:
        tuning = _steps(comparison, recipe, method, settings, refit=False) * comparison.tune_seeds
    return ComparedMethodCost(
        method=method.word,
        label=method.label,
        branches=branch_count(prepared.algorithm, recipe.problem),
        runs=len(comparison.targets) * len(comparison.seeds),
        tuning_runs=len(comparison.targets) * len(settings) * comparison.tune_seeds if tuning else 0,
        steps=final + tuning,
        seconds=plan.seconds["total"] / plan.branch_steps["total"] * (final + tuning),
        memory=plan.memory["total"],
    )


def _steps(
    comparison: Comparison, recipe: Recipe, method: ComparedMethod, settings: Sequence[dict[str, Any]], *, refit: bool
) -> int:
    """Return the training steps of one run of every setting on every target."""
    total = 0
    for target in comparison.targets:
        aimed = replace(recipe, problem=recipe.problem.with_target(target))
        for setting in settings:
            made = with_setting(method.prepare(aimed, refit=refit), setting)
            total += workload(made.algorithm, made.problem, made.steps)
    return total


def _pretraining(recipe: Recipe) -> PretrainingCost | None:
    """Look at what would be pre-trained, and whether its weights would fit."""
    if not isinstance(recipe.model, Pretrained):
        return None
    asked: Pretraining = recipe.model.pretraining
    before = asked.recipe()
    seed = before.options["seed"]
    weights = build_model(lambda: first_model(before.model), seed).state_dict()
    load_part(build_model(lambda: first_model(recipe.model), 0), weights, asked.part)
    done = is_done(content_key(before))
    seconds = 0.0 if done else estimate_run(before).seconds["total"]
    return PretrainingCost(asked.name, before.steps, seconds, done)


def comparison_cost_table(found: ComparisonCost) -> Table:
    """Return what would run, as a table."""
    columns = [
        Column("method", is_words=True),
        *(Column(name, decimals=0) for name in ("B", "runs", "tuning runs", "steps")),
    ]
    columns += [Column(name, is_words=True) for name in ("time", "memory")]
    rows = [
        (
            Cell(text=m.label),
            *(Cell(value) for value in (m.branches, m.runs, m.tuning_runs, m.steps)),
            Cell(text=show_seconds(m.seconds)),
            Cell(text=show_bytes(m.memory)),
        )
        for m in found.methods
    ]
    before = found.pretraining
    notes = [
        f"{len(found.methods)} methods × {len(found.targets)} targets × {len(found.seeds)} seeds: {found.runs} runs, "
        f"{found.steps:,} training steps over all branches.",
        f"In all about {show_seconds(found.seconds)} with {found.workers} processes, by two steps of every method on "
        f"{found.targets[0]!r}; about {show_bytes(found.memory)} of memory, activations and data apart.",
        "Rows: all runs of a method one after the other, and the memory of one. Nothing has been written.",
    ]
    if before is not None:
        how = "is done already" if before.is_done else f"comes first: about {show_seconds(before.seconds)}"
        notes.insert(0, f"Pre-training on {before.recipe}, {before.steps} steps, {how}.")
    return Table("what would run", tuple(columns), tuple(rows), tuple(notes))
