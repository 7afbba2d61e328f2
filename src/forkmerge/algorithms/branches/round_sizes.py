"""How many branches every round of a run trains, and the steps of all of them, known before it starts.

Counts are exact where nothing is searched and upper bounds where pruning may keep fewer branches, or a refit leave out
some that no merge takes anything of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from forkmerge.algorithms.composed import Composed
from forkmerge.algorithms.fit import Algorithm
from forkmerge.algorithms.floor import floor_branch
from forkmerge.algorithms.settings import Settings
from forkmerge.problem.definition import Problem


@dataclass(frozen=True)
class RoundSize:
    """Rounds that are alike: their number, steps each, branches at most, and whether they also train the floor."""

    count: int
    steps: int
    branches: int
    has_floor: bool


def branch_count(algorithm: Algorithm, problem: Problem) -> int:
    """Return B: the branches of a round, or the runs that take their place."""
    runs = getattr(algorithm, "runs", None)
    if runs is not None:
        return int(runs)
    return len(algorithm.settings(problem).rotation(problem).first())


def count_steps(algorithm: Algorithm, problem: Problem, steps: int) -> int:
    """Return the training steps of a run over all branches and phases, at most."""
    if isinstance(algorithm, Composed):
        return algorithm.branch_steps(problem, steps)
    settings = algorithm.settings(problem)
    rounds = round_sizes(settings, problem, steps)
    return steps_by_phase(settings, rounds, len(settings.constructor.probes(problem)))["total"]


def round_sizes(settings: Settings, problem: Problem, steps: int, *, paired: bool = True) -> list[RoundSize]:
    """Return the rounds of one phase: the last is shortened, and pruning is taken to keep as many as it may.

    The floor costs nothing until a merge takes something else than the branch that is trained like it.
    """
    mixtures = settings.rotation(problem).first()
    branches, is_shared = (
        len(mixtures),
        floor_branch(mixtures, problem.target, paired=paired, settings=settings) is not None,
    )
    interval = settings.interval_of(steps)
    count = -(-steps // interval)  # rounded up, also where a float could not hold it
    # There may be millions of rounds, but they change only here.
    changes = sorted({0, 1, settings.prune_after, count - 1, count})
    rounds = []
    for first, end in pairwise(index for index in changes if index <= count):
        pruned = settings.prune_to is not None and first >= settings.prune_after
        left = min(branches, settings.prune_to or branches) if pruned else branches
        has_floor = settings.floor and not (is_shared and (first == 0 or branches == 1))
        rounds.append(RoundSize(end - first, min(interval, steps - first * interval), left, has_floor))
    return rounds


def steps_by_phase(settings: Settings, rounds: Sequence[RoundSize], probes: int) -> dict[str, int]:
    """Return the steps over all branches, by phase, at most."""
    search = sum(r.count * r.steps * r.branches for r in rounds)
    counts = {
        "probes": probes * settings.constructor.probe_steps,
        "search": search if settings.needs_search(rounds[0].branches) else 0,
        "floor": (1 + settings.refit) * sum(r.count * r.steps for r in rounds if r.has_floor),
        "refit": settings.refit * sum(r.count * r.steps * settings.refitted(r.branches) for r in rounds),
    }
    return {**{phase: count for phase, count in counts.items() if count}, "total": sum(counts.values())}
