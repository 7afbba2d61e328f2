"""The refit: the coefficients that were found are replayed, without any search, on training and validation data.

Validation labels are worth training on. The same number of steps is trained from the first weights; pruning, chosen
checkpoint steps and the shortened last round are those of the search. A branch is trained as long as some merge to come
takes something of it: merged weights and averaged optimizers are functions of branches whose coefficient is not 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from forkmerge.algorithms.checkpoint import Phase, RunState, Selection, Snapshot
from forkmerge.algorithms.end_of_round import EndOfRound, MergedRound, TrainedRound
from forkmerge.algorithms.mixtures import ALONE
from forkmerge.algorithms.run_record import Round
from forkmerge.engine.merging.arithmetic import Coefficients
from forkmerge.engine.merging.find_merge import Merge, MergeProblem, find_merge
from forkmerge.engine.merging.searches import Fixed, Search
from forkmerge.engine.training.options import Mixture
from forkmerge.errors import RunFailed


def start_refit(run: RunState, mixtures: list[Mixture], target: str) -> None:
    """Fork again from the first weights; `mixtures` are the branches the run began with."""
    assert run.initial is not None
    assert run.selection is not None
    run.phase = Phase.REFIT
    run.mixtures = [Mixture(ALONE, {target: 1.0})]
    if run.selection.replays:
        taken = taken_branches(run, 0, [mixture.name for mixture in mixtures])
        run.mixtures = [mixture for mixture in mixtures if mixture.name in taken]
    run.searched = run.merged.weights()
    run.branches = []  # before the new ones: both at once would be the peak of the whole run
    run.branches = [run.initial.clone() for _ in run.mixtures]
    run.merged.take_weights(run.initial)
    run.earlier = []
    run.next_round()


def skip_search(run: RunState, search: Search, steps: int) -> None:
    """Begin with the refit: last weights of one branch, or of several with fixed coefficients, leave nothing to search.

    Args:
        run: Where the run stands.
        search: Where several branches are merged, their fixed coefficients; a branch of coefficient 0 is not trained.
        steps: T.
    """
    fixed = search.coefficients if isinstance(search, Fixed) else None
    if fixed is not None:
        run.keep([mixture.name for mixture, share in zip(run.mixtures, fixed, strict=True) if share > 0])
    run.phase = Phase.REFIT
    run.selection = Selection(score=None, metrics={}, step=steps, replays=False)


def taken_branches(run: RunState, first: int, names: Sequence[str]) -> list[str]:
    """Return the branches that a merge from the search's round `first` on takes something of; all, if no merge does.

    What a branch was before it rested does not count: it begins anew from a merge.

    Args:
        run: Where the run stands.
        first: Position of the round.
        names: Branches to choose from.
    """
    assert run.selection is not None
    rounds = [r for r in run.searched_rounds[first:] if r.end <= run.selection.step]
    taken = [name for name in names if _is_taken(name, rounds)]
    return taken or list(names)


def _is_taken(name: str, rounds: Sequence[Round]) -> bool:
    turn = takewhile(lambda r: name in r.branches, rounds)
    return any(r.coefficients.get(name, 0.0) > 0 for r in turn)


def take_chosen(run: RunState, mark: int) -> None:
    """Keep the weights of every branch whose step the search had chosen."""
    for mixture, state in zip(run.mixtures, run.branches, strict=True):
        rounds = [r.branches[mixture.name] for r in run.searched_rounds if mixture.name in r.branches]
        if mark in {branch.entered_step for branch in rounds} or mixture.name not in run.snapshots:
            run.snapshots[mixture.name] = Snapshot(0.0, mark, state.weights())


def replay_merge(run: RunState, trained: TrainedRound, end: EndOfRound) -> tuple[MergedRound, list[str]] | None:
    """Merge with the coefficients that the search found, or with fixed ones; return the merge, and who goes on.

    None if a branch that is needed has diverged, and a searched model is there to be returned instead.
    """
    assert run.selection is not None
    names, faults, script = trained.names, end.find_faulty(trained), run.script
    position = len(run.rounds) - len(run.searched_rounds)
    if script is None and len(names) > 1:
        merge, kept = _fixed_merge(names, faults, end), names
        for name, reason in faults.items():
            run.note(f"round {run.round}: branch {name!r} got coefficient 0: {reason}")
    else:
        groups = script.groups if script else None
        shares = dict(script.coefficients) if script else {names[0]: 1.0}
        merge = Merge(shares, -math.inf, {}, faults=faults, groups=groups)
        kept = taken_branches(run, position + 1, script.kept) if script else names
        for name, reason in faults.items():
            if merge.coefficients.get(name, 0.0) > 0:
                run.note(f"refit given up at step {run.step}: branch {name!r}: {reason}")
                return None
    merged = MergedRound(merge, skipped=[name for name in script.branches if name not in names] if script else [])
    started = time.perf_counter()
    merged.floor = end.parted_floor(trained, merge)
    # Of the first branch there was, trained or left out: recomputed statistics depend on it.
    step = next(iter(script.branches.values())).entered_step if script else None
    end.install(trained, end.blender(trained, step), merge)
    merged.seconds = {"merge": time.perf_counter() - started}
    resting = () if script is None else [name for name in kept if name not in script.branches]
    return merged, [name for name in kept if name in names or name in resting]


class _Unscored(MergeProblem):
    """A merge whose coefficients are fixed: nothing is looked at but faults."""

    def score_branch(self, index: int) -> float:
        """Return the same for every branch."""
        return 0.0

    def score(self, coefficients: Coefficients) -> float:
        """Return the same for every combination."""
        return 0.0


def _fixed_merge(names: Sequence[str], faults: dict[str, str], end: EndOfRound) -> Merge:
    """Return the merge with fixed coefficients; what a faulty branch would have had, the others share."""
    search = end.settings.search_for(len(names))
    assert isinstance(search, Fixed)
    fixed = None if search.coefficients is None else tuple(share for share in search.coefficients if share > 0)
    merge = find_merge(_Unscored(names, faults), Fixed(fixed))
    return Merge(merge.coefficients, -math.inf, {}, faults=merge.faults)


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
