"""The events of `fit`: frozen dataclasses, in the order in which a run sends them.

`RunStarted`, then `RunResumed` or `PhaseStarted`; in every round `StepProgress`, a `BranchTrained` and a `BranchScored`
for every branch, `Merged`, `RoundFinished`, `CheckpointWritten`; `ModelSelected` when the search is over; the same
again for a refit; and at the end `RunFinished` or `TrainingFailed`.

With any executor the events are the same, in the same order, but for seconds and for how often `StepProgress` comes.
A resumed run sends what happens from its checkpoint on: nothing before is repeated, and what an interrupted run had
already told of later steps comes again, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from forkmerge.algorithms.run_record import Candidate, Round


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened.

    Args:
        part: The part it happened in, where an algorithm is made of several runs, e.g. "pretraining"; "" for the run
            itself.
    """

    part: str = ""


OnEvent = Callable[[Event], None]
"""Called with every event, in the process and thread of `fit`, which waits for it."""


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """Something that a reader should know.

    Args:
        text: What.
        is_warning: Whether something is wrong.
    """

    text: str
    is_warning: bool = False


@dataclass(frozen=True, kw_only=True)
class PretrainingProgress(Event):
    """How far the pre-training of a recipe is, which comes before its runs.

    Args:
        name: What it trains on.
        step: Steps so far.
        steps: All of them.
        begins: Whether it begins, or goes on, there.
    """

    name: str
    step: int
    steps: int
    begins: bool


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """All checks are over, and a run begins or goes on.

    Args:
        algorithm: Name of the algorithm.
        target: The target task.
        seed: The run's seed.
        steps: T, the training steps of every branch.
        rounds: Rounds of a phase.
        refit: Whether a refit follows the search.
        folder: Where it is kept; None if nowhere.
        is_resumed: Whether `fit` was asked to resume, and there was something to resume.
        branch_steps: Training steps of all parts together, where an algorithm is made of several runs; 0 elsewhere.
    """

    algorithm: str
    target: str
    seed: int
    steps: int
    rounds: int
    refit: bool = False
    folder: str | None = None
    is_resumed: bool = False
    branch_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class ProbeScored(Event):
    """A short ranking run, before the branches are known, was scored.

    Args:
        branch: Its name.
        step: Its steps.
        score: Its validation score.
    """

    branch: str
    step: int
    score: float


@dataclass(frozen=True, kw_only=True)
class InPhase(Event):
    """Something that happened in a phase.

    Args:
        phase: "search" (of coefficients), "refit" (they are repeated on more data) or "done".
        round: The round under way, counted from 1 over all phases.
        step: Training steps of every branch in this phase; a refit counts from 0 again.
    """

    phase: str
    round: int
    step: int


@dataclass(frozen=True, kw_only=True)
class PhaseStarted(InPhase):
    """The model was forked for a search or for a refit.

    Args:
        until: The step at which the phase ends.
        branches: Task weights of every branch, `{branch: {task: weight}}`.
        has_floor: Whether an unmerged target-only run goes beside them, as the branch "floor" once it is not one of
            them any more.
        branch_bytes: What the branches of all rounds will take on disk, where they are kept.
    """

    until: int
    branches: dict[str, dict[str, float]]
    has_floor: bool = False
    branch_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StepProgress(InPhase):
    """A branch has been trained some steps further; how often that is told depends on the executor.

    Args:
        branch: Its name; "floor" for the unmerged target-only run.
        losses: Mean training loss of every task over these steps.
        seconds: What they took.
        reports: Gradients of tasks that were odd, `{what: {task: steps}}`.
    """

    branch: str
    losses: dict[str, float]
    seconds: float = 0.0
    reports: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BranchTrained(InPhase):
    """A branch has reached the end of a round.

    Args:
        branch: Its name.
        losses: Mean training loss of every task over the round.
    """

    branch: str
    losses: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class BranchScored(InPhase):
    """What a branch brings into a merge was scored on the target's validation data; a refit scores nothing.

    Args:
        branch: Its name.
        score: Its score, higher is better; None if that is not finite, or if the branch is faulty.
        metrics: The metrics behind it.
        entered_step: The step of the weights that enter the merge.
        fault: Why the branch got coefficient 0 without being tried, if it did.
    """

    branch: str
    score: float | None
    metrics: dict[str, float]
    entered_step: int
    fault: str | None = None


@dataclass(frozen=True, kw_only=True)
class Merged(InPhase):
    """The branches were merged.

    Args:
        coefficients: Λ by branch; empty if every branch was faulty and the last good weights were kept.
        score: Validation score of the merge; None in a refit.
        metrics: The metrics behind it.
        relevance: λ_k = Σ_b Λ_b s_b ν^b_k by task, s_b the branch's `lr_scale`.
        candidates: Every combination tried, in order.
        certainty: Share of resamples in which the winner beat the target-only branch, where `confidence` asks for it.
        floor_score: Validation score of the unmerged target-only run, where `floor=True`.
    """

    coefficients: dict[str, float]
    score: float | None
    metrics: dict[str, float]
    relevance: dict[str, float]
    candidates: list[Candidate]
    certainty: float | None = None
    floor_score: float | None = None


@dataclass(frozen=True, kw_only=True)
class RoundFinished(InPhase):
    """A round is over.

    Args:
        record: All of it, as it will stand in `Run.rounds`.
    """

    record: Round


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(InPhase):
    """The run can be continued from here; where there is no folder, it could be.

    Args:
        until: The step at which the phase ends.
        steps: The step of every branch: not all the same where a round was interrupted.
    """

    until: int
    steps: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class RunResumed(InPhase):
    """The run goes on from this checkpoint: forget what was told of later steps, it comes again.

    Args:
        until: The step at which the phase ends.
        steps: The step of every branch.
    """

    until: int
    steps: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ModelSelected(InPhase):
    """The search is over: this model is returned, or refitted.

    Args:
        final: "last merge", "best merge" or "floor"; the step is the one it was found at.
        score: Its validation score.
        metrics: The metrics behind it.
    """

    final: str
    score: float | None
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The run has ended, now or, where a finished one is resumed, before.

    Args:
        final: Which model is returned.
        step: T.
        score: Its validation score before any refit.
        metrics: The metrics behind it.
        seconds: Wall time by phase.
    """

    final: str
    step: int
    score: float | None
    metrics: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TrainingFailed(InPhase):
    """The run learned nothing, and `fit` raises `RunFailed`.

    Args:
        reason: Why.
    """

    reason: str


def record_line(event: Event) -> dict[str, Any] | None:
    """Return what the record of a run's folder says of an event; None for what it has no use for."""
    if isinstance(event, ProbeScored):
        return {"event": "probe", "branch": event.branch, "score": event.score, "step": event.step}
    if not isinstance(event, InPhase):
        return None
    line: dict[str, Any] = {"event": "", "phase": event.phase, "round": event.round}
    if isinstance(event, StepProgress):
        details = {name: getattr(event, name) for name in ("branch", "step", "losses", "seconds", "reports")}
        return {**line, "event": "segment", **details}
    if isinstance(event, RoundFinished):
        return {**line, "event": "round", **asdict(event.record)}
    if isinstance(event, TrainingFailed):
        return {**line, "event": "failed", "reason": event.reason}
    return None
