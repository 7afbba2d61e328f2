"""A combination of branches measured on validation data, in any process, exactly as it would be installed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from forkmerge.engine.merging.arithmetic import Coefficients
from forkmerge.engine.merging.batchnorm_policy import recompute_statistics
from forkmerge.engine.merging.blend import blend_weights
from forkmerge.engine.merging.layer_groups import LayerGroups
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.options import Training
from forkmerge.engine.training.state import State
from forkmerge.problem.definition import Problem
from forkmerge.problem.metrics import ExampleCosts
from forkmerge.problem.scoring import read_metrics


@dataclass(frozen=True)
class MeasureRequest:
    """A combination of states to measure on the target's validation data.

    Args:
        coefficients: One per state, or, where there are groups, one per state and group.
        indices: The examples; None takes all, and gives the costs of each where the score adds up.
        phase: The phase whose training data gives BatchNorm statistics.
        batches: How many batches of it; 0 leaves the statistics as they are merged.
        has_origin: Whether the last of the states is their common fork point, which has no coefficient.
        groups: The layer groups, where coefficients are by group.
    """

    coefficients: Coefficients
    indices: tuple[int, ...] | None = None
    phase: str = "search"
    batches: int = 0
    has_origin: bool = False
    groups: LayerGroups | None = None


@dataclass(frozen=True)
class Measurement:
    """What was measured of a combination.

    Args:
        metrics: The target's metrics; None if the weights are not finite.
        costs: What every example costs, where the score adds up.
        seconds: Wall time.
    """

    metrics: dict[str, float] | None
    costs: ExampleCosts | None
    seconds: float


def measure_candidate(
    binding: ModelBinding,
    problem: Problem,
    states: Sequence[State],
    request: MeasureRequest,
    out: State,
    *,
    training: Training,
    seed: int,
) -> Measurement:
    """Measure a combination of states exactly as it would be installed.

    Args:
        binding: The module to measure with.
        problem: The sealed problem, of the request's phase.
        states: The states.
        request: What to measure.
        out: Takes the combination.
        training: Options common to all branches.
        seed: The run's seed.
    """
    started = time.perf_counter()
    branches, origin = (states[:-1], states[-1]) if request.has_origin else (states, None)
    state = blend_weights(binding, branches, request.coefficients, out, origin, request.groups)
    if state is out and request.batches:
        recompute_statistics(binding, state, problem, training=training, seed=seed, count=request.batches)
    metrics, costs = None, None
    if state.is_finite():
        binding.attach_weights(state)
        metrics, costs = read_metrics(binding.model, problem.target_validation, request.indices, seed)
    return Measurement(metrics, costs, time.perf_counter() - started)
