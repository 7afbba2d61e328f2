"""What a run would do and cost, found out before it starts; every `--dry-run` is made of such costs.

Counts are exact where nothing is searched and upper bounds where a search or pruning may stop earlier, or a refit leave
out branches that no merge takes anything of. Times and sizes come from two real steps of every branch, on copies;
nothing is written and the model is left as it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from forkmerge.algorithms.branches.iterates import iterate_steps
from forkmerge.algorithms.branches.round_sizes import RoundSize, round_sizes, steps_by_phase
from forkmerge.algorithms.composed import Composed
from forkmerge.algorithms.fit import build_model
from forkmerge.algorithms.floor import floor_mixture
from forkmerge.algorithms.preflight import check_numbers
from forkmerge.algorithms.settings import Settings, disk_of_run
from forkmerge.engine.executors.branch_execution import BranchExecution, open_branches
from forkmerge.engine.executors.branch_worker import Segment, TrainingJob
from forkmerge.engine.executors.executor_options import ExecutorOptions, executor_options
from forkmerge.engine.executors.serial import SerialExecutor
from forkmerge.engine.merging.layer_groups import LayerGroups
from forkmerge.engine.merging.rules import ARGMAX, BAGGED
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.state import Layout, State, StateSizes
from forkmerge.experiments.bytes_of_run import memory_of_run, sizes_of
from forkmerge.experiments.execution import with_workers
from forkmerge.experiments.pretraining import first_model
from forkmerge.experiments.recipe import Recipe
from forkmerge.experiments.short_training import short_training
from forkmerge.problem.definition import Problem
from forkmerge.problem.scoring import measure
from forkmerge.problem.searched_evaluation import of_every_example


@dataclass(frozen=True)
class BranchCost:
    """One branch, or probe, and what a step of it takes; its factor on the learning rate."""

    name: str
    task_weights: dict[str, float]
    seconds_per_step: float
    lr_scale: float = 1.0


@dataclass(frozen=True)
class RunCost:
    """What a run would do and cost.

    Args:
        algorithm: Name of the algorithm.
        target: The target task.
        weights: "loss" or "sampling": what a task weight means.
        steps: T, the steps of every branch.
        interval: Δt.
        merges: Merges of the search.
        branches: The branches. Those built from probes are shown as if all probes scored the same.
        probes: Short runs that come before.
        branch_steps: Steps over all branches, by phase (probes, search, floor, refit), and "total".
        passes: Validation passes "per merge", and "total", one before training included; passes over a sub-sample
            count by its share. Where candidates are raced, a small part of this is done.
        examples: Validation examples of a full pass.
        memory: Bytes by part, and "total"; activations and data come on top.
        disk: Bytes of one "checkpoint", of the "checkpoints" kept, the "branches" kept and the "model"; "total".
        seconds: Estimated time of "training" and "validation", and "total".
        parameters: Trainable parameters.
        workers: Processes that train branches.
        in_round: How many of the branches a round trains, where they take turns; 0 where all do.
        tail: Of a whole round's steps, those in which every branch trains on the target alone.
    """

    algorithm: str
    target: str
    weights: str
    steps: int
    interval: int
    merges: int
    branches: list[BranchCost]
    probes: list[BranchCost]
    branch_steps: dict[str, int]
    passes: dict[str, float]
    examples: int
    memory: dict[str, int]
    disk: dict[str, int]
    seconds: dict[str, float]
    parameters: int
    workers: int
    tail: int = 0
    in_round: int = 0


def estimate_run(recipe: Recipe, *, workers: int | None = None, timed_steps: int = 1) -> RunCost:
    """Return what a recipe would do and cost; everything that `fit` refuses is refused here, too.

    Args:
        recipe: The run.
        workers: Processes that train branches; the recipe's own where None.
        timed_steps: Steps of every branch that are timed, after a first one.
    """
    options, algorithm, steps = recipe.options, recipe.algorithm, recipe.steps
    executor = _executor_of(recipe, workers)
    workers = executor.workers
    check_numbers(steps, options.get("seed", 0), options.get("threads"))
    seed = options.get("seed", 0)
    model = build_model(lambda: first_model(recipe.model), seed)
    settings = algorithm.resolved(recipe.problem.sealed(), model, seed, steps, {}).settings(recipe.problem)
    problem = settings.searched(recipe.problem.sealed(), seed)
    threads = options.get("threads") or executor.threads
    with short_training(recipe, settings, model, seed) as training:
        # Loader processes, too, take long to start; without them, times are upper bounds.
        job = TrainingJob(problem, model, replace(training, loader_workers=0), seed, threads)
        timing = _time_branches(job, settings, timed_steps)
    branches, probes = timing.branches, timing.probes
    rounds = round_sizes(settings, problem, steps, paired=training.paired)
    groups = 1 if settings.layer_groups is None else len(LayerGroups.of(settings.layer_groups, Layout(model)).names)
    passes = _count_passes(settings, problem, rounds, len(probes), groups)
    training_seconds = _training_seconds(settings, problem, rounds, timing, workers)
    training_seconds += _bn_batches(settings, model, rounds, groups) * branches[0].seconds_per_step
    trained, inside = sum(r.count * r.branches for r in rounds), bool(options.get("checkpoint_every"))
    seconds = {"training": training_seconds, "validation": passes["total"] * timing.seconds_per_pass}
    cost = RunCost(
        algorithm=type(algorithm).__name__,
        target=problem.target,
        weights=problem.weights,
        steps=steps,
        interval=settings.interval_of(steps),
        merges=sum(r.count for r in rounds) if settings.needs_search(rounds[0].branches) else 0,
        branches=branches,
        probes=probes,
        branch_steps=steps_by_phase(settings, rounds, len(probes)),
        passes=passes,
        examples=problem.target_validation.size,
        memory=memory_of_run(settings, timing.sizes, rounds[0].branches, workers),
        disk=disk_of_run(settings, timing.sizes, rounds[0].branches, trained, inside=inside),
        seconds={**seconds, "total": sum(seconds.values())},
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        workers=workers,
        tail=settings.tail_steps(settings.interval_of(steps)),
        in_round=rounds[0].branches if rounds[0].branches < len(branches) else 0,
    )
    return _whole(cost, algorithm.branch_steps(problem, steps)) if isinstance(algorithm, Composed) else cost


def _executor_of(recipe: Recipe, workers: int | None) -> ExecutorOptions:
    """Return what branches are trained by: the recipe's executor, or this machine's processes."""
    executor = with_workers(recipe.executor, workers)
    if executor is None:
        executor = executor_options(None, workers or recipe.options.get("workers"), recipe.options.get("devices"))
    return executor


def _whole(part: RunCost, steps: int) -> RunCost:
    """Return the cost of an algorithm made of several runs, in proportion to one of them; a part's folder stays."""
    times = steps / part.branch_steps["total"]
    return replace(
        part,
        branch_steps={"parts": steps, "total": steps},
        passes={**part.passes, "total": part.passes["total"] * times},
        disk={**part.disk, "total": math.ceil(part.disk["total"] * times)},
        seconds={name: value * times for name, value in part.seconds.items()},
    )


@dataclass(frozen=True)
class _Timing:
    """What a few steps of every branch showed; `alone` is how long a step on the target alone takes."""

    branches: list[BranchCost]
    probes: list[BranchCost]
    alone: float
    sizes: StateSizes
    seconds_per_pass: float


def _time_branches(job: TrainingJob, settings: Settings, steps: int) -> _Timing:
    probes = settings.probes(job.problem)
    mixtures = settings.branches(job.problem, dict.fromkeys((probe.name for probe in probes), 0.0))
    with open_branches(job, SerialExecutor()) as execution:
        initial = execution.binding.initial()
        try:
            timed = [_time_steps(execution, mixture, initial.clone(), steps) for mixture in (*mixtures, *probes)]
            alone = next((cost for cost, _ in timed if _trains_alone(cost, job.problem.target)), None)
            if alone is None and (settings.floor or settings.tail is not None):
                alone, _ = _time_steps(execution, floor_mixture(job.problem.target), initial.clone(), steps)
            seconds_per_pass = _time_pass(execution, job.problem)
        finally:
            execution.binding.release(initial)
    costs, sizes = [cost for cost, _ in timed], sizes_of(job.model, [state for _, state in timed])
    seconds = (alone or costs[0]).seconds_per_step
    return _Timing(costs[: len(mixtures)], costs[len(mixtures) :], seconds, sizes, seconds_per_pass)


def _trains_alone(cost: BranchCost, target: str) -> bool:
    return [task for task, weight in cost.task_weights.items() if weight > 0] == [target]


def _count_passes(
    settings: Settings, problem: Problem, rounds: Sequence[RoundSize], probes: int, groups: int
) -> dict[str, float]:
    """Return the validation passes of the first merge and of the whole search, at most."""
    examples = problem.target_validation.size
    whole = of_every_example(problem.target_validation).size / examples  # a pass over all, where searches see a sample
    if not settings.needs_search(rounds[0].branches):
        return {"per merge": 0.0, "total": whole}  # the one that tries the metrics before training
    share = min(settings.search_examples or examples, examples) / examples
    snapshots = settings.checkpoint != "last"
    every = settings.validate_every_of(sum(r.count * r.steps for r in rounds))

    def of(r: RoundSize) -> float:
        # The vertices of the search are the branches themselves, which are scored anyway, and so is what is returned.
        blends, entrants = _count_blends(settings, r.branches, groups), settings.entrants(r.branches)
        ranked = math.ceil(r.steps / every) * r.branches if snapshots else r.branches
        # Every earlier merge that may be taken, and the mean of every branch's iterates, is scored like a branch.
        ranked += entrants - r.branches + _count_means(settings, r)
        if settings.search_examples is None:
            return ranked + blends + r.has_floor
        # Fixed coefficients are not searched, so their one blend is scored on all examples only.
        searched = blends if settings.search_for(entrants).guarded else 0
        return ranked + (blends > 0) + r.has_floor + share * (entrants + searched)

    total = sum(r.count * of(r) for r in rounds) + probes + whole  # the last one tries the metrics before training
    total += whole * (1 + settings.floor) if whole > 1 else 0.0  # what is returned, or the floor, measured on all
    return {"per merge": of(rounds[0]), "total": total}


def _count_means(settings: Settings, r: RoundSize) -> int:
    """Return how many means of iterates a round has; one that is too short has none."""
    return r.branches if iterate_steps(settings.average_iterates, 0, r.steps) else 0


def _count_blends(settings: Settings, branches: int, groups: int) -> int:
    """Return how many combinations of several branches a merge tries at most."""
    entrants = settings.entrants(branches)
    search = settings.search_for(entrants)
    if entrants == 1:
        return 0
    if not search.guarded:
        return 1
    others = (settings.rule != ARGMAX) + (settings.rule == BAGGED)  # uniform coefficients, and the mean of the winners
    return max(settings.evaluations(branches, groups) - entrants, 0) + others


def _time_steps(execution: BranchExecution, mixture: Mixture, state: State, steps: int) -> tuple[BranchCost, State]:
    """Train one step and then those that count, less what a call costs that does no step at all."""
    seconds = []
    if mixture.auxiliary_streams == "one":  # whose steps differ: each stream in turn
        steps *= len(execution.job.problem.stream_map)
    for count in (1, 0, steps):
        (result,) = execution.train([Segment("search", mixture, count)], [state])
        seconds.append(result.seconds)
    step = max(seconds[2] - seconds[1], seconds[2] / 10) / steps
    return BranchCost(mixture.name, dict(mixture.task_weights), step, mixture.lr_scale), state


def _time_pass(execution: BranchExecution, problem: Problem) -> float:
    """Measure one validation batch twice; the second one counts, scaled to all examples."""
    evaluation, examples = problem.target_validation, problem.target_validation.size
    indices = range(min(evaluation.batch_size, examples))
    for _ in range(2):
        started = time.perf_counter()
        measure(execution.binding.model, evaluation, indices=indices, seed=execution.job.seed)
        seconds = time.perf_counter() - started
    return seconds * examples / len(indices)


def _training_seconds(
    settings: Settings, problem: Problem, rounds: Sequence[RoundSize], timing: _Timing, workers: int
) -> float:
    """Add up rounds, each as long as its slowest worker; the slowest branches are taken to survive pruning.

    Of branches that take turns the slowest are taken to do so all the time.
    """
    turning = settings.rotation(problem).turning
    ordered = sorted(timing.branches, key=lambda branch: (branch.name in turning, -branch.seconds_per_step))
    steps = [branch.seconds_per_step for branch in ordered]
    probes = [probe.seconds_per_step for probe in timing.probes]
    total = settings.constructor.probe_steps * _makespan(probes, workers)
    alone = timing.alone

    def phase(branches: Callable[[int], int]) -> float:
        total = 0.0
        for r in rounds:
            own, tail, floor = steps[: branches(r.branches)], settings.tail_steps(r.steps), [alone] * r.has_floor
            total += r.count * (r.steps - tail) * _makespan([*own, *floor], workers)
            total += r.count * tail * _makespan([*[alone] * len(own), *floor], workers)
        return total

    searched = phase(int) if settings.needs_search(rounds[0].branches) else 0.0
    return total + searched + (phase(settings.refitted) if settings.refit else 0.0)


def _makespan(seconds: Sequence[float], workers: int) -> float:
    return max([*seconds, sum(seconds) / workers])  # branches change workers where that keeps all busy


def _bn_batches(settings: Settings, model: nn.Module, rounds: Sequence[RoundSize], groups: int) -> int:
    """Forward passes that recompute BatchNorm statistics, for every blend tried and every one that a refit installs."""
    norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if settings.bn != "recompute" or not norms:
        return 0
    means = sum(r.count * _count_means(settings, r) for r in rounds)
    installed = settings.refit * (means + sum(r.count * (settings.entrants(r.branches) > 1) for r in rounds))
    blends = means + sum(r.count * _count_blends(settings, r.branches, groups) for r in rounds)
    return settings.bn_batches * (blends * settings.needs_search(rounds[0].branches) + installed)
