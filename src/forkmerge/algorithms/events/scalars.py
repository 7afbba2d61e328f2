"""The numbers of an event under the names that they have in a log: whatever a logger needs of a run."""

from __future__ import annotations

from collections.abc import Mapping

from forkmerge.algorithms.events.run_events import (
    BranchScored,
    BranchTrained,
    Event,
    InPhase,
    Merged,
    ProbeScored,
    RoundFinished,
    RunFinished,
    StepProgress,
)

Scalars = dict[str, float]


def scalars(event: Event) -> tuple[int, Scalars]:
    """Return the step of an event and its numbers by name; most events have none.

    - `loss/BRANCH/TASK` over the last steps, `round_loss/BRANCH/TASK` over a round;
    - `branch_score/BRANCH`, `branch_metric/BRANCH/METRIC`; `probe_score/BRANCH`;
    - `coefficient/BRANCH`, `relevance/TASK`, `score`, `metric/METRIC`, `certainty`, `floor_score`;
    - `seconds/PHASE` of a round.

    Names of a refit, whose steps count from 0 again, begin with `refit/`; those of a part of a composed algorithm with
    the part's name. What was not measured is left out; what is not finite is not.

    Example:
        >>> from forkmerge.algorithms.events import StepProgress
        >>> scalars(StepProgress(phase="search", round=1, step=50, branch="joint", losses={"ctr": 0.25}))
        (50, {'loss/joint/ctr': 0.25})
    """
    step = event.step if isinstance(event, InPhase | ProbeScored | RunFinished) else 0
    is_refit = isinstance(event, InPhase) and event.phase == "refit"
    prefix = (f"{event.part}/" if event.part else "") + "refit/" * is_refit
    return step, {prefix + name: float(value) for name, value in _numbers(event).items() if value is not None}


def _numbers(event: Event) -> Mapping[str, float | None]:
    if isinstance(event, StepProgress):
        return _named(f"loss/{event.branch}", event.losses)
    if isinstance(event, BranchTrained):
        return _named(f"round_loss/{event.branch}", event.losses)
    if isinstance(event, BranchScored):
        metrics = _named(f"branch_metric/{event.branch}", event.metrics)
        return {f"branch_score/{event.branch}": event.score, **metrics}
    if isinstance(event, Merged):
        alone = {"score": event.score, "certainty": event.certainty, "floor_score": event.floor_score}
        shares = {**_named("coefficient", event.coefficients), **_named("relevance", event.relevance)}
        return {**shares, **alone, **_named("metric", event.metrics)}
    if isinstance(event, RoundFinished):
        return _named("seconds", event.record.seconds)
    return {f"probe_score/{event.branch}": event.score} if isinstance(event, ProbeScored) else {}


def _named(kind: str, values: Mapping[str, float]) -> dict[str, float | None]:
    return {f"{kind}/{name}": value for name, value in values.items()}
