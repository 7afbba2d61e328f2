"""Probes: short runs that are scored before the branches can be built; most constructors have none."""

from __future__ import annotations

from forkmerge.algorithms.checkpoint import Phase
from forkmerge.algorithms.events.round_events import RoundEvents
from forkmerge.algorithms.settings import Settings
from forkmerge.algorithms.validation import Validator
from forkmerge.engine.executors.branch_execution import BranchExecution
from forkmerge.engine.executors.branch_worker import Segment
from forkmerge.engine.training.interrupts import is_stop_requested, stop_now
from forkmerge.engine.training.state import State


def score_probes(
    settings: Settings, execution: BranchExecution, validator: Validator, initial: State, events: RoundEvents
) -> dict[str, float]:
    """Train every probe from the first weights and return their validation scores by name.

    Args:
        settings: The algorithm's options, which name the probes.
        execution: Trains them.
        validator: Scores them.
        initial: The first weights.
        events: Get the score of every probe.
    """
    probes = settings.probes(execution.job.problem)
    segments = [Segment(Phase.SEARCH.value, probe, settings.constructor.probe_steps) for probe in probes]
    scores: dict[str, float] = {}
    results = execution.train(segments, [initial.clone() for _ in probes])
    try:
        for probe, result in zip(probes, results, strict=True):
            if is_stop_requested():
                stop_now()  # there is nothing to save yet
            scores[probe.name] = validator.score(result.state)
            events.probe(probe.name, result.state.step, scores[probe.name])
    finally:
        execution.binding.attach(initial)  # nothing is saved yet: a second attempt starts from the module itself
    return scores
