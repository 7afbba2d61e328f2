"""What a comparison would cost: the sum over its runs, a run of every method on the first target standing for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forkmerge.algorithms.branches.round_sizes import branch_count, count_steps
from forkmerge.algorithms.fit import build_model
from forkmerge.engine.executors.parallel_calls import using_threads
from forkmerge.errors import ConfigError, ForkMergeError
from forkmerge.experiments.compared_methods import ComparedMethod, with_setting
from forkmerge.experiments.comparison import Comparison, settings_of
from forkmerge.experiments.cost_of_run import estimate_run
from forkmerge.experiments.pretraining import Pretrained, Pretraining, content_key, first_model, is_done, load_part
from forkmerge.experiments.recipe import Recipe, seeded_recipe
from forkmerge.problem.randomness import random_state_kept


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
    made = seeded_recipe(recipe.source, seed, target)
    return replace(made, options={**made.options, "seed": seed, "threads": 1, "workers": 1})


def _method(comparison: Comparison, recipe: Recipe, method: ComparedMethod) -> ComparedMethodCost:
    prepared, settings = method.prepare(recipe, refit=comparison.equal_labels), settings_of(comparison, method)
    try:
        cost = estimate_run(with_setting(prepared, settings[0]))
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
        seconds=cost.seconds["total"] / cost.branch_steps["total"] * (final + tuning),
        memory=cost.memory["total"],
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
            total += count_steps(made.algorithm, made.problem, made.steps)
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
