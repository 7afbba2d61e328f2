"""Means of a branch's last iterates, which enter a merge where they validate better than the branch itself."""

from __future__ import annotations

from dataclasses import replace

from forkmerge.algorithms.checkpoint import Average, Phase, RunState
from forkmerge.algorithms.end_of_round import EndOfRound, TrainedRound
from forkmerge.engine.merging.blend import blend_weights
from forkmerge.engine.training.model_binding import ModelBinding


def iterate_steps(count: int | None, start: int, end: int) -> list[int]:
    """Return the steps of a round whose iterates are averaged: evenly spaced over its last half, the last one included.

    Fewer than `count` where the half has fewer steps; none where there would be one.
    """
    half = (end - start) // 2
    steps = sorted({end - half * back // count for back in range(count)}) if count else []
    return steps if len(steps) > 1 else []


def add_iterates(run: RunState, binding: ModelBinding) -> None:
    """Add the present weights of every branch to its mean; in a refit of those alone whose mean the search had taken.

    A mean of n iterates is that of n − 1 moved by an nth of the way to the new one, whose counters it has.
    """
    for mixture, state in zip(run.mixtures, run.branches, strict=True):
        if run.phase is Phase.REFIT and not _replays_mean(run, mixture.name):
            continue
        mean = run.averages.get(mixture.name)
        if mean is None:
            run.averages[mixture.name] = Average(1, state.weights())
            continue
        mean.count += 1
        share = 1 / mean.count
        blend_weights(binding, [mean.weights, state], (1 - share, share), mean.weights)
        counters = {name: value.clone() for name, value in state.buffers.items() if not value.is_floating_point()}
        mean.weights.buffers |= counters
        mean.weights.step = state.step


def _replays_mean(run: RunState, name: str) -> bool:
    script = run.script
    return script is not None and name in script.branches and script.branches[name].averaged is not None


def with_means(run: RunState, trained: TrainedRound, end: EndOfRound) -> TrainedRound:
    """Return the round with means of iterates as what enters, where they are better; a refit repeats the choice.

    Args:
        run: Where the run stands.
        trained: The round.
        end: Scores states.
    """
    means = {name: mean for name, mean in run.averages.items() if mean.count > 1}
    if not means:
        return trained
    refresh = end.refresh(trained.phase, trained.end)
    for mean in means.values():
        if refresh is not None and mean.weights.is_finite():
            refresh(mean.weights)
    names = trained.names
    if trained.phase is Phase.SEARCH:
        entering = dict(zip(names, trained.entering, strict=True))
        end.rank([*entering.values(), *(mean.weights for mean in means.values())])
        score = end.validator.score
        means = {
            name: mean
            for name, mean in means.items()
            if score(mean.weights, remeasure=False) > score(entering[name], remeasure=False)
        }
    return replace(
        trained,
        entering=[
            means[name].weights if name in means else state for name, state in zip(names, trained.entering, strict=True)
        ],
        averaged={name: mean.count for name, mean in means.items()},
    )
