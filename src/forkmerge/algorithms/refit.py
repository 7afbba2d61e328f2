"""The refit: the coefficients that were found are replayed, without any search, on training and validation data.

Validation labels are worth training on. The same number of steps is trained from the first weights; pruning, chosen
checkpoint steps and the shortened last round are those of the search.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from forkmerge.algorithms.checkpoint import Phase, RunState, Selection, Snapshot
from forkmerge.algorithms.end_of_round import EndOfRound, MergedRound, TrainedRound
from forkmerge.algorithms.mixtures import ALONE
from forkmerge.engine.merging.find_merge import Merge
from forkmerge.engine.training.options import Mixture
from forkmerge.errors import RunFailed


def start_refit(run: RunState, mixtures: list[Mixture], target: str) -> None:
    """Fork again from the first weights; `mixtures` are the branches the run began with."""
    assert run.initial is not None
    assert run.selection is not None
    run.phase = Phase.REFIT
    run.mixtures = mixtures if run.selection.replays else [Mixture(ALONE, {target: 1.0})]
    run.searched = run.merged.weights()
    run.branches = []  # before the new ones: both at once would be the peak of the whole run
    run.branches = [run.initial.clone() for _ in run.mixtures]
    run.merged.take_weights(run.initial)
    run.next_round()


def skip_search(run: RunState, steps: int) -> None:
    """Begin with the refit: one branch and its last weights leave nothing to search."""
    run.phase = Phase.REFIT
    run.selection = Selection(score=None, metrics={}, step=steps, replays=False)


def take_chosen(run: RunState, mark: int) -> None:
    """Keep the weights of every branch whose step the search had chosen."""
    for mixture, state in zip(run.mixtures, run.branches, strict=True):
        rounds = [r.branches[mixture.name] for r in run.searched_rounds if mixture.name in r.branches]
        if mark in {branch.entered_step for branch in rounds} or mixture.name not in run.snapshots:
            run.snapshots[mixture.name] = Snapshot(0.0, mark, state.weights())


def replay_merge(run: RunState, trained: TrainedRound, end: EndOfRound) -> tuple[MergedRound, list[str]] | None:
    """Merge with the coefficients that the search found; return the merge, and the branches that go on.

    None if a branch that is needed has diverged.
    """
    assert run.selection is not None
    searched = run.searched_rounds
    script = searched[len(run.rounds) - len(searched)] if run.selection.replays else None
    names = trained.names
    coefficients = dict(script.coefficients) if script else {names[0]: 1.0}
    faults = end.find_faulty(trained)
    for name, reason in faults.items():
        if coefficients.get(name, 0.0) > 0:
            run.note(f"refit given up at step {run.step}: branch {name!r}: {reason}")
            return None
    merged = MergedRound(Merge(coefficients, -math.inf, {}, faults=faults))
    started = time.perf_counter()
    merged.floor = end.parted_floor(trained, merged.merge)
    end.install(trained, end.blender(trained), merged.merge)
    merged.seconds = {"merge": time.perf_counter() - started}
    return merged, list(script.kept) if script else names


def give_up(run: RunState) -> None:
    """End the run with the model that was searched; where nothing was, nothing was learned."""
    if run.searched is None:
        raise RunFailed(f"nothing was learned: {run.notes[-1]}.")
    run.merged.take_weights(run.searched)
    run.phase = Phase.DONE


def finish_refit(run: RunState) -> None:
    """End the run with the refitted model."""
    assert run.selection is not None
    run.selection = replace(run.selection, final="refit")
    run.phase = Phase.DONE
