"""What fits into a budget of time: how many seeds, which λ, how many steps."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forkmerge.algorithms import Algorithm
from forkmerge.algorithms.table_data import show_seconds
from forkmerge.analysis.advice import ProbeSettings
from forkmerge.analysis.transfer import WEIGHTS
from forkmerge.analysis.transfer_runs import Recipes, equal_weights, single_task
from forkmerge.engine.executors.parallel_calls import using_threads
from forkmerge.engine.storage.records import Record
from forkmerge.errors import ConfigError
from forkmerge.experiments.cost_of_run import RunCost, estimate_run
from forkmerge.problem.randomness import random_state_kept

_TIMED = (10, 40)  # steps that are timed, at least and at most
_MEASURES = 3  # passes over validation data when a run has ended: metrics, confidence, loss
_STARTING = 6.0  # seconds until a worker process has imported torch
_SLACK = 1.1  # processes do not end at the same moment
Key = tuple[str, str, float, int]
"""A piece of a diagnosis: kind, auxiliary, λ and seed."""

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TWO, _THREE = (0.25, 1.0), (1 / 16, 0.25, 1.0)  # λ, besides 1 alone and all of WEIGHTS
MAPPED, PARTNERS = 4, 2  # auxiliaries that get a t-SNE picture, and that the target-only model is mixed with
MAP_POINTS, RESOLUTION, LINE_POINTS = 150, 10, 11  # of the pictures
_EMBEDDING = 6.0  # seconds of t-SNE for one picture
_READING = 60  # steps that take as long as the features of one picture


@dataclass(frozen=True)
class _Level:
    """How thorough a diagnosis is: seeds, λ, ForkMerge's seeds, batches for single steps, tasks with a picture."""

    seeds: int
    weights: tuple[float, ...]
    merges: int = 3
    one_step: int = 20
    pictures: int = 0


_LEVELS = (
    *(_Level(seeds, (1.0,), merges=1, one_step=0) for seeds in (2, 3)),
    _Level(3, _TWO),
    *(_Level(seeds, _TWO, pictures=MAPPED) for seeds in (3, 4, 5, 6)),
    *(_Level(seeds, _THREE, pictures=MAPPED) for seeds in (5, 6, 7, 8)),
    *(_Level(seeds, WEIGHTS, pictures=MAPPED) for seeds in (6, 8, 10, 12, 15, 20)),
)
"""From the least to the most that is worth doing, all with runs of full length: another λ, then pictures, then enough
seeds for an interval, then more λ. What a level leaves of the budget goes into more seeds. Only where the first does
not fit runs are shortened, as little as need be."""

_SHORTEST = 1 / 16  # of the recipe's steps
_MOST_SEEDS = _LEVELS[-1].seeds


@dataclass(frozen=True)
class PieceTimes(Record):
    """What training takes, in seconds of one thread.

    Args:
        alone: One step of the target alone.
        pairs: One step of the target with an auxiliary, by auxiliary.
        fixed: What every run takes besides its steps: the recipe, checks, validation.
        loading: What the first recipe of a process takes.
    """

    alone: float
    pairs: dict[str, float]
    fixed: float
    loading: float


@dataclass(frozen=True)
class DiagnosisPlan(Record):
    """What a diagnosis does.

    Args:
        seeds: Paired seeds, 0, 1, ….
        weights: λ > 0.
        steps: Training steps of every run.
        full_steps: The recipe's own.
        merges: Seeds that ForkMerge is run with.
        batches: Batches that gradients are compared on.
        one_step: Batches of the one-step experiment.
        probe: The cheap estimate behind the advice.
        workers: Processes.
        estimate: Seconds it will take.
        pictures: Auxiliaries that get a t-SNE picture, the first of them; 0 for no pictures of any kind.
    """

    seeds: int
    weights: tuple[float, ...]
    steps: int
    full_steps: int
    merges: int
    batches: int
    one_step: int
    probe: ProbeSettings
    workers: int
    estimate: float
    pictures: int = 0

    def describe(self) -> str:
        """Return the plan in one sentence."""
        share = "all" if self.steps == self.full_steps else f"{self.steps} of"
        lambdas = ", ".join(f"{weight:g}" for weight in self.weights)
        pictures = ", pictures" if self.pictures else ""
        return (
            f"{self.seeds} seeds, λ in {{{lambdas}}}, {share} {self.full_steps} steps, ForkMerge with {self.merges} of "
            f"the seeds, gradients on {self.batches} batches{pictures}: about {show_seconds(self.estimate)} with "
            f"{self.workers} process{'es' * (self.workers > 1)}"
        )


def seconds_from(text: str) -> float:
    """Return the seconds of a duration such as 90s, 20m or 1.5h.

    Example:
        >>> seconds_from("20m")
        1200.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in ("", *_UNITS) or float(match[1]) == 0:
        raise ConfigError(f"--budget {text}: write a duration such as 90s, 20m or 1.5h.")
    return float(match[1]) * _UNITS[match[2] or "s"]


def time_pieces(recipes: Recipes, seed: int = 0) -> PieceTimes:
    """Return what training takes, from a few steps of every kind of run."""
    started = time.perf_counter()
    recipe = recipes(seed)
    loaded = time.perf_counter()
    recipe = replace(recipes(seed), options={**recipe.options, "seed": seed, "threads": 1})  # only the first is slow
    again = time.perf_counter() - loaded
    steps = min(max(recipe.steps // 20, _TIMED[0]), _TIMED[1])

    def cost(algorithm: Algorithm) -> RunCost:
        return estimate_run(replace(recipe, algorithm=algorithm), workers=1, timed_steps=steps)

    with random_state_kept(), using_threads(1):
        alone = cost(single_task(recipe))
        pairs = [cost(equal_weights(recipe, auxiliary, 1.0)) for auxiliary in recipe.problem.auxiliaries]
    step, validation = alone.branches[0].seconds_per_step, alone.seconds["validation"]
    return PieceTimes(
        alone=step,
        pairs={
            auxiliary: max(pair.branches[0].seconds_per_step, step)
            for auxiliary, pair in zip(recipe.problem.auxiliaries, pairs, strict=True)
        },
        fixed=again + validation * (1 + _MEASURES / alone.passes["total"]),
        loading=loaded - started,
    )


def plan_budget(costs: PieceTimes, probe: ProbeSettings, full_steps: int, budget: float, workers: int) -> DiagnosisPlan:
    """Return the most thorough plan that fits into a budget; one that fits nothing is refused with what is needed.

    Args:
        costs: What training takes.
        probe: The cheap estimate behind the advice.
        full_steps: The recipe's steps.
        budget: Seconds.
        workers: Processes.
    """

    def plan(level: _Level, steps: int = full_steps) -> DiagnosisPlan:
        return _plan(costs, full_steps, workers, probe, level, steps)

    whole = [level for level in _LEVELS if plan(level).estimate <= budget]
    if whole:
        level = whole[-1]
        seeds = _most(lambda n: plan(replace(level, seeds=n)).estimate <= budget, level.seeds, _MOST_SEEDS)
        return plan(replace(level, seeds=seeds))
    shortest = max(round(_SHORTEST * full_steps), min(full_steps, 2))
    for level in _LEVELS[1::-1]:
        if plan(level, shortest).estimate <= budget:
            return plan(level, _most(lambda n: plan(level, n).estimate <= budget, shortest, full_steps))  # noqa: B023
    least = plan(_LEVELS[0], shortest).estimate
    raise ConfigError(
        f"a budget of {show_seconds(budget)} is too small: the least that says anything takes about "
        f"{show_seconds(least)}. Give --budget {least * 1.2 / 60 + 0.5:.0f}m, or more --workers."
    )


def _most(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number up to `high` that fits, given that `low` does and that more never takes less."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _plan(
    costs: PieceTimes, full_steps: int, workers: int, probe: ProbeSettings, level: _Level, steps: int
) -> DiagnosisPlan:
    plan = DiagnosisPlan(
        seeds=level.seeds,
        weights=level.weights,
        steps=steps,
        full_steps=full_steps,
        merges=min(level.seeds, level.merges),
        batches=40,
        one_step=level.one_step,
        probe=probe,
        workers=workers,
        estimate=0.0,
        pictures=level.pictures,
    )
    return replace(plan, estimate=estimated(plan, costs))


def estimated(plan: DiagnosisPlan, costs: PieceTimes) -> float:
    """Return the seconds that a plan takes with its processes."""
    seconds = piece_seconds(plan, costs).values()
    starting = (_STARTING + costs.loading) if plan.workers > 1 else 0.0
    return max(sum(seconds) / plan.workers * _SLACK, *seconds) + starting


def piece_seconds(plan: DiagnosisPlan, costs: PieceTimes) -> dict[Key, float]:
    """Return what every piece of a plan takes: by kind, auxiliary, λ and seed."""
    seconds: dict[Key, float] = {}
    every = costs.alone + sum(costs.pairs.values())
    for seed in range(plan.seeds):
        seconds["single task", "", 0.0, seed] = costs.fixed + plan.steps * costs.alone
        for auxiliary, pair in costs.pairs.items():
            for weight in plan.weights:
                seconds["transfer", auxiliary, weight, seed] = costs.fixed + plan.steps * pair
        seconds["probe", "", 0.0, seed] = costs.fixed + _probing(plan.probe, costs)
    for seed in range(plan.merges):
        seconds["ForkMerge", "", 1.0, seed] = costs.fixed * 3 + plan.steps * every
    gradients = costs.fixed + plan.steps / 2 * costs.alone + plan.batches * every
    gradients += plan.one_step * (len(costs.pairs) + 1) * (len(WEIGHTS) + 1) * costs.fixed / 2
    seconds["gradients", "", 0.0, 0] = gradients
    if plan.pictures:
        seconds["pictures", "", 0.0, 0] = _picturing(plan, costs)
    return seconds


def _picturing(plan: DiagnosisPlan, costs: PieceTimes) -> float:
    pairs = list(costs.pairs.values())[:PARTNERS]
    training = (len(pairs) + 1) * costs.fixed + plan.steps * (costs.alone + sum(pairs))
    mixed = math.comb(RESOLUTION + len(pairs), len(pairs)) + len(pairs) * 2 * (LINE_POINTS + 1)
    maps = min(len(costs.pairs), plan.pictures) * (_EMBEDDING + _READING * costs.alone)
    return training + mixed * costs.fixed / 2 + maps


def _probing(probe: ProbeSettings, costs: PieceTimes) -> float:
    return probe.prefix * costs.alone + probe.steps * (costs.alone + len(probe.weights) * sum(costs.pairs.values()))


def longest_first(seconds: dict[Key, float]) -> Sequence[Key]:
    """Return the pieces seed by seed, the longest of each first, so that no process ends alone with a long one."""
    return sorted(seconds, key=lambda key: (key[3], -seconds[key], key))
