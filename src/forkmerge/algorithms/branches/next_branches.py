"""Which branches go on after a merge: all, those that pruning keeps, or those whose turn it is."""

from __future__ import annotations

from forkmerge.algorithms.checkpoint import RunState
from forkmerge.algorithms.end_of_round import TrainedRound, prune
from forkmerge.algorithms.settings import Settings
from forkmerge.engine.merging.find_merge import Merge
from forkmerge.problem.definition import Problem


def next_branches(
    run: RunState, settings: Settings, problem: Problem, trained: TrainedRound, merge: Merge, *, is_last: bool
) -> list[str]:
    """Return the names of the branches that go on.

    Args:
        run: Where the run stands.
        settings: The algorithm's options.
        problem: The problem.
        trained: The round.
        merge: Its merge.
        is_last: Whether no round follows.
    """
    names = trained.names
    if settings.per_round is not None and not is_last:
        turns = [(set(r.branches), r.coefficients) for r in run.searched_rounds]
        return settings.rotation(problem, run.probes).after([*turns, (names, merge.coefficients)])
    is_pruned = any(ended.index >= settings.prune_after and ended.coefficients for ended in run.rounds)
    if settings.prune_to is None or run.round < settings.prune_after or is_pruned or not merge.coefficients:
        return names
    return prune(trained, merge, problem.target, settings.prune_to, settings.prune_keeps)
