"""From the coefficients of a whole model to coefficients of its layer groups."""

from __future__ import annotations

import math

from forkmerge.engine.merging.arithmetic import Coefficients
from forkmerge.engine.merging.candidates import Candidates
from forkmerge.engine.merging.layer_groups import collapsed, expanded

_STEPS = (0.5, 1.0)  # how far a group's coefficients are moved to one branch


def search_groups(score: Candidates, start: Coefficients, groups: int) -> Coefficients:
    """Return the best coefficients by group that one pass over the groups finds from those of the whole model.

    Group by group, its coefficients Λ are moved to every branch in turn, half of the way and all of it:
    (1 − s) Λ + s (Σ Λ) e_b. The best of these is taken if it beats what there was, so the answer is never worse than
    `start`; of equals the smaller step and the branch listed first.

    Args:
        score: Scores candidates.
        start: The coefficients of the whole model.
        groups: How many groups there are.
    """
    count, best = len(start), expanded(start, len(start), groups)
    for group in range(groups):
        first = group * count
        part = best[first : first + count]
        moved = (_moved(part, branch, step) for step in _STEPS for branch in range(count))
        trials = [best, *(best[:first] + each + best[first + count :] for each in moved)]
        winner = score.best_among([collapsed(t, count) for t in trials], guides=[collapsed(best, count)])
        best = expanded(winner, count, groups)
    return collapsed(best, count)


def group_evaluations(branches: int, groups: int) -> int:
    """Return how many candidates `search_groups` scores at most."""
    return groups * branches * len(_STEPS) if branches > 1 else 0


def _moved(part: Coefficients, branch: int, step: float) -> Coefficients:
    total = math.fsum(part)
    return tuple((1 - step) * value + step * total * (index == branch) for index, value in enumerate(part))
