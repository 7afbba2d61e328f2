"""The floor: an unmerged target-only run beside the branches, returned if it validates better than the merge."""

from __future__ import annotations

from dataclasses import replace

from forkmerge.algorithms.checkpoint import RunState, Selection
from forkmerge.algorithms.mixtures import ALONE
from forkmerge.algorithms.validation import Validator
from forkmerge.engine.executors.branch_worker import Segment
from forkmerge.engine.training.options import Mixture

FLOOR = "floor"
"""How events and notes call it."""


def floor_segment(target: str, phase: str, steps: int) -> Segment:
    """Return a stretch of the floor's training: the target alone, with the seeds of the branches."""
    return Segment(phase, Mixture(ALONE, {target: 1.0}), steps)


def prefer_floor(run: RunState, selection: Selection, validator: Validator, steps: int) -> Selection:
    """Return the floor as the selection, its weights taken, if it scored better than the merge that was selected."""
    score = run.rounds[-1].floor_score
    if score is None or run.floor is None or (selection.score is not None and score <= selection.score):
        return selection
    run.merged.take_weights(run.floor)
    run.note("the unmerged target-only run validated better than the merge and is returned")
    metrics = validator.known_metrics(run.floor)
    return replace(selection, final=FLOOR, score=score, metrics=metrics, step=steps, replays=False)
