"""The slow twin of `fit`: Algorithms 1, 2 and 3 as the paper's text has them, in plain torch.

Of the library it takes nothing but the order of examples and the random states of forward passes, which are functions
of the seed and the step, and what a problem says: its data, its losses, its metric.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import forkmerge as fm
from forkmerge.problem.example_order import batch_indices, pick_task
from forkmerge.problem.randomness import derive, set_random_state

Weights = dict[str, Tensor]
GRID = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass
class Naive:
    """θ*_T, and for every round Λ* and the branches that go on."""

    weights: Weights
    coefficients: list[dict[str, float]] = field(default_factory=list)
    groups: list[list[list[float]]] = field(default_factory=list)
    averaged: list[list[str]] = field(default_factory=list)
    kept: list[list[str]] = field(default_factory=list)


def combine(branches: Sequence[Weights], coefficients: Sequence[float]) -> Weights:
    """Σ_b Λ_b θ^b; counters are no parameters and come from the branch of the largest Λ."""
    heaviest = branches[max(range(len(branches)), key=lambda b: coefficients[b])]
    merged = {}
    for name, value in heaviest.items():
        parts = [c * theta[name] for c, theta in zip(coefficients, branches, strict=True) if c > 0]
        merged[name] = torch.stack(parts).sum(0) if value.is_floating_point() else value.clone()
    return merged


def combine_groups(branches: Sequence[Weights], parts: Sequence[Sequence[float]], prefixes: Sequence[str]) -> Weights:
    """Every tensor as Σ_b Λ_b θ^b with the coefficients of its group; the last group is what no prefix begins."""
    merged = [combine(branches, part) for part in parts]
    groups = {
        name: next((i for i, p in enumerate(prefixes) if name.startswith(f"{p}.")), len(parts) - 1)
        for name in branches[0]
    }
    return {name: merged[groups[name]][name] for name in branches[0]}


def groups_search(
    performance: Callable[[Sequence[Sequence[float]]], float], start: list[float], count: int
) -> list[list[float]]:
    """One pass over the groups: each moved half of the way, then all of it, to every branch."""
    parts = [start] * count
    for group in range(count):
        trials = [parts]
        for step in (0.5, 1.0):
            for branch in range(len(start)):
                moved = [(1 - step) * v + step * (b == branch) for b, v in enumerate(parts[group])]
                trials.append([*parts[:group], moved, *parts[group + 1 :]])
        parts = max(trials, key=performance)
    return parts


def mean_of(iterates: Sequence[Weights]) -> Weights:
    """The mean of some weights; counters come from the last of them."""
    return {
        name: torch.stack([each[name] for each in iterates]).mean(0) if last.is_floating_point() else last.clone()
        for name, last in iterates[-1].items()
    }


def grid_search(performance: Callable[[Sequence[float]], float]) -> list[float]:
    """Algorithm 1: λ* of two branches, of equals the smaller."""
    best = max(GRID, key=lambda value: performance([1 - value, value]))
    return [1 - best, best]


def greedy_search(performance: Callable[[Sequence[float]], float], count: int) -> list[float]:
    """Algorithm 3, with the grid of [0, U] in fifths."""

    def normalised(values: Sequence[float]) -> list[float]:
        return [value / sum(values) for value in values]

    alone = [performance([float(b == only) for b in range(count)]) for only in range(count)]
    ranked = sorted(range(count), key=lambda b: -alone[b])
    chosen = [float(b == ranked[0]) for b in range(count)]
    for already, b in enumerate(ranked[1:], start=1):
        upper = sum(chosen) / already
        trials = [[alpha * upper if i == b else value for i, value in enumerate(chosen)] for alpha in GRID]
        chosen = max(trials, key=lambda values: performance(normalised(values)))
    return normalised(chosen)


def train(
    model: nn.Module, optimizer: Any, problem: fm.Problem, weights: Mapping[str, float], step: int, seed: int
) -> None:
    """θ ← θ − η Σ_k ν_k g_k, or one step on a task that is drawn, where weights are sampling weights."""
    tasks = [task for task in problem.tasks if weights.get(task, 0) > 0]
    if sampled := problem.weights == "sampling":
        tasks = [pick_task(tasks, [weights[task] for task in tasks], seed, step)]
    optimizer.zero_grad()
    total: Any = 0.0
    for name, stream in problem.stream_map.items():
        here = [task for task in stream.tasks if task in tasks]
        if here:
            chosen = batch_indices(len(stream.dataset), stream.batch_size, step, seed, name)
            batch = default_collate([stream.dataset[int(i)] for i in chosen])
            set_random_state(derive(seed, name, "forward", step))
            losses = stream.losses(model, batch, here, fm.Context(step, seed, None))
            total = total + sum(losses[task] * (1.0 if sampled else weights[task]) for task in here)
    total.backward()
    optimizer.step()


def take_turns(
    trained: Sequence[str], shares: Mapping[str, float], queue: Sequence[str], places: int
) -> tuple[list[str], list[str]]:
    """Who is trained next, and who waits: the better half stays, the others go to the end of the queue."""
    ranked = sorted(trained, key=lambda name: -shares[name])
    staying = [name for name in ranked if shares[name] > 0][: places // 2]
    queue = [*queue, *(name for name in ranked if name not in staying)]
    called = places - len(staying)
    return staying + queue[:called], queue[called:]


def stay_or_shift(
    trained: Sequence[str], shares: Mapping[str, float], queue: Sequence[str], branches: int
) -> tuple[list[str], list[str]]:
    """Who is trained next, and who waits: winners of an equal share stay, losers go to the end of the queue."""
    staying = [name for name in trained if shares[name] > 1 / branches - 1e-9]
    queue = [*queue, *(name for name in trained if name not in staying)]
    called = len(trained) - len(staying)
    return staying + queue[:called], queue[called:]


def halve(
    left: list[str], shares: dict[str, float], queue: list[str], places: int
) -> tuple[list[str], list[str], list[str]]:
    """Who is trained next, who waits, and who is left: an empty queue ends a pass, which the better half survives."""
    best_first = sorted(left, key=lambda name: -shares.get(name, 0.0))
    if not queue:
        survivors = best_first[: max(places, (len(left) + 1) // 2)]
        left = queue = [name for name in left if name in survivors]
    called, queue = queue[:places], queue[places:]
    while len(called) < places:
        called = [*called, next(name for name in best_first if name in left and name not in called)]
    return called, queue, left


def naive_forkmerge(
    problem: fm.Problem,
    net: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    mixtures: Mapping[str, Mapping[str, float]],
    *,
    steps: int,
    interval: int,
    seed: int = 0,
    prune_to: int | None = None,
    prune_after: int = 1,
    always_kept: str | None = None,
    replay: Naive | None = None,
    per_round: int | None = None,
    turns: str = "rotation",
    previous_merges: int = 0,
    average_iterates: int = 0,
    layer_groups: Mapping[str, str] | None = None,
) -> Naive:
    """Algorithm 2 (Algorithm 1 for two branches), pruned once; with `replay`, the Λ of another run and no search.

    With `per_round`, branches with some auxiliaries, but not all, stand in a queue for that many places. The last
    `previous_merges` merges, the first weights among them, are searched with the branches, the mean of a branch's last
    iterates takes its place where it is better, and `layer_groups` begin with the names given, or are the rest.
    """
    set_random_state(derive(seed, "model"))
    first = net()
    auxiliaries = {name: sum(task != problem.target for task in weights) for name, weights in mixtures.items()}
    partial = [name for name, count in auxiliaries.items() if 0 < count < len(problem.tasks) - 1]
    if turns in ("win_stay", "win_stay_all"):
        partial = sorted((name for name, count in auxiliaries.items() if count), key=lambda name: -auxiliaries[name])
    if turns == "win_stay_all":
        partial = [*(name for name, count in auxiliaries.items() if not count), *partial]
    places = None if per_round is None else per_round + (turns == "win_stay_all")
    queue = [] if places is None else partial[places:]
    survivors, seen = partial, dict[str, float]()
    models = {name: copy.deepcopy(first).train() for name in mixtures if name not in queue}
    optimizers = {name: optimizer(model) for name, model in models.items()}
    judge, validation = copy.deepcopy(first).eval(), problem.target_validation
    result, examples = Naive({}), default_collate(list(validation.dataset))
    (metric,) = validation.metrics.values()
    earlier, prefixes = [copy.deepcopy(first.state_dict())], list((layer_groups or {}).values())

    def score(weights: Weights) -> float:
        judge.load_state_dict(weights)
        with torch.no_grad():
            return float(metric(*validation.predict(judge, examples)))

    for t in range(0, steps, interval):
        iterates: dict[str, list[Weights]] = {}
        for name, model in models.items():
            end = min(t + interval, steps)
            wanted = [end - ((end - t) // 2) * j // average_iterates for j in range(average_iterates)]
            iterates[name] = []
            for step in range(t, end):
                train(model, optimizers[name], problem, mixtures[name], step, seed)
                if step + 1 in wanted:
                    iterates[name].append(copy.deepcopy(model.state_dict()))
        entering = {name: model.state_dict() for name, model in models.items()}
        averaged = []
        for name, found_iterates in iterates.items():
            if len(found_iterates) > 1:
                mean = mean_of(found_iterates)
                is_better = score(mean) > score(entering[name])
                if name in replay.averaged[t // interval] if replay is not None else is_better:
                    entering[name] = mean
                    averaged.append(name)
        for back, weights in enumerate(earlier[:previous_merges], 1):
            entering["previous merge" if back == 1 else f"previous merge {back}"] = weights
        thetas = list(entering.values())

        def performance(coefficients: Sequence[float], thetas: Sequence[Weights] = thetas) -> float:
            return score(combine(thetas, coefficients))

        def performance_of_groups(parts: Sequence[Sequence[float]], thetas: Sequence[Weights] = thetas) -> float:
            return score(combine_groups(thetas, parts, prefixes))

        if replay is not None:
            found = list(replay.coefficients[t // interval].values())
        elif len(thetas) == 1:
            found = [1.0]
        else:
            found = grid_search(performance) if len(thetas) == 2 else greedy_search(performance, len(thetas))
        merged = combine(thetas, found)
        shares = dict(zip(entering, found, strict=True))
        if layer_groups:
            count = len(prefixes) + 1
            parts = (
                groups_search(performance_of_groups, found, count) if replay is None else replay.groups[t // interval]
            )
            merged = combine_groups(thetas, parts, prefixes)
            result.groups.append(parts)
        result.averaged.append(averaged)
        earlier.insert(0, merged)
        for model in models.values():
            model.load_state_dict(merged)
        if replay is not None:
            left = replay.kept[t // interval]
        elif per_round is not None and t + interval < steps:
            seen.update({name: shares[name] for name in models if name in partial})
            if turns == "halving":
                left, queue, survivors = halve(survivors, seen, queue, per_round)
            elif turns in ("win_stay", "win_stay_all"):
                left, queue = stay_or_shift([name for name in partial if name in models], shares, queue, len(models))
            else:
                left, queue = take_turns([name for name in models if name in partial], shares, queue, per_round)
            left += [name for name in mixtures if name not in partial]
        elif prune_to is not None and t // interval + 1 == prune_after:
            ranked = sorted(models, key=lambda name: (name != always_kept, -shares[name]))
            left = [name for name in ranked if name == always_kept or shares[name] > 0][:prune_to]
        else:
            left = list(models)
        heaviest = max(models, key=lambda name: shares[name])
        for name in left:
            if name not in models:  # it has rested
                models[name] = copy.deepcopy(models[heaviest])
                optimizers[name] = optimizer(models[name])
                optimizers[name].load_state_dict(copy.deepcopy(optimizers[heaviest].state_dict()))
        models = {name: models[name] for name in mixtures if name in left}
        result.coefficients.append(shares)
        result.kept.append(list(models))
        result.weights = merged
    return result
