"""What `fit` tells while it runs: typed events for callbacks, their numbers for loggers, and progress made of them."""

from __future__ import annotations

from forkmerge.algorithms.events.run_events import (
    BranchScored,
    BranchTrained,
    CheckpointWritten,
    Event,
    Merged,
    ModelSelected,
    Notice,
    OnEvent,
    PhaseStarted,
    PretrainingProgress,
    ProbeScored,
    RoundFinished,
    RunFinished,
    RunResumed,
    RunStarted,
    StepProgress,
    TrainingFailed,
)
from forkmerge.algorithms.events.scalars import scalars

__all__ = [
    "BranchScored",
    "BranchTrained",
    "CheckpointWritten",
    "Event",
    "Merged",
    "ModelSelected",
    "Notice",
    "OnEvent",
    "PhaseStarted",
    "PretrainingProgress",
    "ProbeScored",
    "RoundFinished",
    "RunFinished",
    "RunResumed",
    "RunStarted",
    "StepProgress",
    "TrainingFailed",
    "scalars",
]
