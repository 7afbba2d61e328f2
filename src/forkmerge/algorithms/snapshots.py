"""Which weights of a branch enter a merge: its last ones, or those that scored best on validation."""

from __future__ import annotations

from collections.abc import Callable

from forkmerge.algorithms.checkpoint import Phase, RunState, Snapshot
from forkmerge.algorithms.end_of_round import EndOfRound
from forkmerge.algorithms.refit import take_chosen
from forkmerge.algorithms.settings import Settings
from forkmerge.engine.training.state import State


def uses_snapshots(run: RunState, settings: Settings) -> bool:
    """Whether other weights than the last may enter the round's merge."""
    if run.phase is Phase.REFIT and run.selection is not None and not run.selection.replays:
        return False  # an unmerged run is refitted as it was trained, to its last step
    return settings.checkpoint != "last"


def entering_states(run: RunState, settings: Settings) -> list[State]:
    """Return what enters the round's merge, in the order of the branches."""
    if not uses_snapshots(run, settings):
        return run.branches
    return [run.snapshots[mixture.name].weights for mixture in run.mixtures]


def take_snapshots(run: RunState, end: EndOfRound, mark: int, fix_reference: Callable[[], None]) -> None:
    """Keep the weights of every branch that are its best so far; a refit keeps those the search had chosen.

    Args:
        run: Where the run stands.
        end: Scores the branches.
        mark: The step.
        fix_reference: Called before a branch is scored, for several metrics.
    """
    if run.phase is Phase.REFIT:
        take_chosen(run, mark)
        return
    validator = end.validator
    for state in run.branches:
        validator.forget(state)
    end.rank(run.branches)
    for mixture, state in zip(run.mixtures, run.branches, strict=True):
        fix_reference()
        score, best = validator.score(state, remeasure=False), run.snapshots.get(mixture.name)
        if best is None or score > best.score:
            run.snapshots[mixture.name] = Snapshot(score, mark, state.weights())
            validator.keep(run.snapshots[mixture.name].weights, state)
