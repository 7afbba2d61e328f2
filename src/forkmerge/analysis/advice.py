"""Cheap advice: will an auxiliary help or hurt, at a tenth of what training with it would cost?

The target alone is trained for a while; from there it goes on with every auxiliary, and without, for a few steps on
the same batches. What the auxiliary does to the target's loss on validation examples is its affinity. A fork from a
model that has seen the target asks what the auxiliary adds to it; from the first weights on, nearly every auxiliary
looks harmful, because sharing a step slows the target down at first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal

from torch import nn

from forkmerge.algorithms import SingleTask
from forkmerge.algorithms.fit import build_model
from forkmerge.algorithms.mixtures import ALONE
from forkmerge.analysis.heldout import heldout_loss, reads_heldout
from forkmerge.analysis.results import Advised, TransferCurve
from forkmerge.analysis.transfer import shown_effects
from forkmerge.engine.executors.parallel_calls import using_threads
from forkmerge.engine.storage.records import Record
from forkmerge.engine.training.branch import train_branch
from forkmerge.engine.training.options import Mixture, Training
from forkmerge.experiments.paired_statistics import CONFIDENCE, compare_paired
from forkmerge.experiments.recipe import Recipe
from forkmerge.experiments.short_training import short_training
from forkmerge.problem.definition import Problem
from forkmerge.problem.metrics import Criterion
from forkmerge.problem.randomness import random_state_kept
from forkmerge.problem.scoring import measure

SHARE = 0.1
"""The share of full training that a probe may cost."""

TOLERANCE = 0.05
"""A relative rise of the target's loss that is no sign of negative transfer: unrelated tasks cost about so much while
they are new. Chosen on the demo's problem with 20 to 600 labels. Scores have none: their units differ."""

Measure = Literal["loss", "score"]

_CHECKS = (0.5, 0.75, 1.0)  # a short run is judged over its second half: one batch more or less moves a loss


@dataclass(frozen=True)
class ProbeSettings(Record):
    """Where the target's training is forked, and for how long.

    Args:
        prefix: Steps of the target alone before auxiliaries join it.
        steps: Steps of each short run.
        weights: λ that are tried.
    """

    prefix: int
    steps: int
    weights: tuple[float, ...] = (1.0,)


def probe_settings(problem: Problem, full_steps: int, share: float = SHARE) -> ProbeSettings:
    """Return a probe that costs at most a share of one full run per auxiliary and one of the target alone.

    Half of it goes into the target's own training, at most a quarter of a run, the rest into short runs.
    """
    units = 1 + sum(pair_units(problem, auxiliary) for auxiliary in problem.auxiliaries)
    prefix = min(int(share / 2 * units * full_steps), full_steps // 4)
    steps = int((share * units * full_steps - prefix) / units)
    return ProbeSettings(max(prefix, 1), max(steps, 1))


def pair_units(problem: Problem, auxiliary: str) -> int:
    """Return the batches that a step of the target with an auxiliary reads."""
    tasks = (problem.target, auxiliary)
    return sum(any(task in tasks for task in stream.tasks) for stream in problem.stream_map.values())


@dataclass(frozen=True)
class ShortRun(Record):
    """A few steps with one auxiliary beside the same steps without it.

    Args:
        auxiliary: The auxiliary.
        weight: λ.
        seed: The seed.
        effect: How much better the target is with it, relative to without it; the mean over the second half of the
            run.
        measure: What got better: its "loss" on validation examples, or its "score" where its stream cannot read them.
    """

    auxiliary: str
    weight: float
    seed: int
    effect: float
    measure: Measure = "loss"


def probe(recipe: Recipe, settings: ProbeSettings, seed: int) -> list[ShortRun]:
    """Fork the target's own training and go on with every auxiliary from there.

    Args:
        recipe: The problem and how to train on it.
        settings: Where to fork, and for how long.
        seed: Of first weights, batches and everything else.
    """
    with random_state_kept(), using_threads(1):
        model = build_model(recipe.model, seed)
        with short_training(recipe, SingleTask().settings(recipe.problem), model, seed) as training:
            return _short_runs(model, recipe.problem.sealed(), training, settings, seed)


def _short_runs(
    model: nn.Module, problem: Problem, training: Training, settings: ProbeSettings, seed: int
) -> list[ShortRun]:
    binding = training.binding(model)
    train = partial(train_branch, binding, problem, training=training, seed=seed)
    trunk = binding.initial()
    train(Mixture(ALONE, {problem.target: 1.0}), trunk, steps=settings.prefix)
    # A few steps leave an accuracy on some tens of examples where it was; a loss moves.
    measured: Measure = "loss" if reads_heldout(model, problem, seed) else "score"
    criterion = Criterion(problem.target_validation.directions)
    is_relative = measured == "score" and criterion.needs_reference  # such scores are relative changes already
    checked_steps = sorted({max(round(share * settings.steps), 1) for share in _CHECKS})

    def value_now() -> float:
        nonlocal criterion
        if measured == "loss":
            return -heldout_loss(model, problem, seed=seed)
        metrics = measure(model, problem.target_validation, seed=seed)
        if criterion.needs_reference:
            criterion = criterion.with_reference(metrics)
        return criterion.score(metrics)

    def values_with(weights: dict[str, float]) -> list[float]:
        # The optimizer goes on as it is: after a reset the target alone overfits so fast that even a clashing task
        # looks helpful (measured on the demo's problem with 20 labels).
        branch, values = trunk.clone(), []
        for step in checked_steps:
            done = branch.step - trunk.step
            train(Mixture("short run", {problem.target: 1.0, **weights}), branch, steps=step - done)
            binding.attach_weights(branch)
            values.append(value_now())
        return values

    base = values_with({})
    return [
        ShortRun(auxiliary, weight, seed, _effect(values_with({auxiliary: weight}), base, is_relative), measured)
        for auxiliary in problem.auxiliaries
        for weight in settings.weights
    ]


def _effect(values: Sequence[float], base: Sequence[float], is_relative: bool) -> float:
    scales = [1.0 if is_relative or not b else abs(b) for b in base]
    return fmean((value - b) / scale for value, b, scale in zip(values, base, scales, strict=True))


@dataclass(frozen=True)
class Affinity(Record):
    """What short runs with an auxiliary say of it.

    Args:
        auxiliary: The auxiliary.
        mean: Mean effect over seeds.
        low: Lower end of its confidence interval; None for one seed.
        high: Upper end.
        measure: What effects are of.
    """

    auxiliary: str
    mean: float
    low: float | None
    high: float | None
    measure: Measure = "loss"

    @property
    def is_negative(self) -> bool:
        """Whether negative transfer is predicted."""
        return not self.mean >= -(TOLERANCE if self.measure == "loss" else 0.0)


def affinity(runs: Sequence[ShortRun], auxiliary: str, weight: float = 1.0, confidence: float = CONFIDENCE) -> Affinity:
    """Return the mean effect of an auxiliary over seeds, with its interval."""
    own = [run for run in runs if run.auxiliary == auxiliary and run.weight == weight]
    effects, measured = {run.seed: run.effect for run in own}, own[0].measure if own else "loss"
    finite = {seed: value for seed, value in effects.items() if math.isfinite(value)}
    paired = compare_paired(finite, dict.fromkeys(finite, 0.0), confidence)
    if paired is None or len(finite) < len(effects):  # a run that diverged is as bad as can be
        return Affinity(auxiliary, -math.inf, None, None, measured)
    return Affinity(auxiliary, paired.mean, paired.low, paired.high, measured)


def advise(curve: TransferCurve | None, estimate: Affinity | None, *, is_whole: bool = True) -> tuple[Advised, str]:
    """Return what to do with an auxiliary, and why.

    What full training has shown counts first, and only that says "use". Where it leaves a doubt, or was not done, the
    probe decides, if its whole interval lies on one side of zero, or, as a precaution, if it leans against the
    auxiliary and nothing speaks for that. Shortened runs from scratch decide nothing, and count only where they lean
    towards an auxiliary: in their first steps nearly every one looks harmful.

    Args:
        curve: TG(λ) with the auxiliary.
        estimate: What the probe says.
        is_whole: Whether the runs behind the curve had all their steps.
    """
    if curve is not None and is_whole and (shown := _shown(curve)) is not None:
        return shown
    if estimate is None:
        return "no difference shown", "the runs show no clear effect" if is_whole else "shortened runs decide nothing"
    if not math.isfinite(estimate.mean):
        return "drop", "short trials with it diverged"
    lean = 0.0 if curve is None else round(curve.points[-1].mean, 9)  # what rounding leaves of nothing is nothing
    lean = lean if is_whole else max(lean, 0.0)
    full = "full training has not shown a gain" if curve is not None and is_whole else "nothing was trained in full"
    if estimate.low is not None and estimate.low > 0 and lean >= 0:
        return "try", f"short trials with it improve the target's {estimate.measure} on validation data, and {full}"
    if estimate.high is not None and estimate.high < 0 and estimate.is_negative and lean <= 0:
        return "down-weight", f"short trials with it worsen the target's {estimate.measure} on validation data"
    if lean <= 0 and estimate.is_negative:
        what = "runs and short trials" if lean else "short trials"
        return "down-weight", f"{what} lean against it, though not beyond doubt"
    if lean > 0 and not estimate.is_negative:
        if curve is not None and curve.verdict == "positive":  # of shortened runs: whole ones have decided above
            return (
                "no difference shown",
                "shortened runs show a gain, and only runs of full length decide: raise --budget",
            )
        return "no difference shown", "runs and short trials lean towards it, but not beyond noise"
    return "no difference shown", "runs and short trials show no clear effect, or differ"


def _shown(curve: TransferCurve) -> tuple[Advised, str] | None:
    """What whole runs show; the largest λ, the plain sum of losses, counts first. None where they leave a doubt."""
    best, plain = curve.best, curve.points[-1]
    effect = shown_effects(curve.points, curve.confidence)[plain.weight]
    diverged, at = plain.mean == -math.inf, f"λ = {plain.weight:g}"
    if curve.verdict == "strong negative":
        return "drop", "it hurts at every λ that was tried"
    if diverged or effect < 0:
        harm = f"training with it diverged at {at}" if diverged else f"it hurts at {at}"
        if best.mean > 0:
            return "down-weight", f"{harm}, and the mean gain at λ = {best.weight:g} is positive"
        return "drop", f"{harm}, and no λ that was tried has a positive mean gain"
    if effect > 0:
        return "use", f"it helps at {at}"
    if curve.verdict == "positive" and plain.mean > 0:
        return "use", f"it helps at a smaller λ than {plain.weight:g}, and leans towards helping at {at}"
    if curve.verdict == "positive":
        return "down-weight", f"it helps at a smaller λ than {plain.weight:g}, and no gain shows at {at}"
    if curve.verdict == "weak negative" and best.mean <= 0:
        return "drop", "it hurts at some λ, and no λ that was tried has a positive mean gain"
    return None
