"""Branches that cannot enter a merge, because something in them is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from forkmerge.engine.training.state import State

Losses = Mapping[str, Mapping[str, float]]


def find_faulty(
    names: Sequence[str],
    states: Sequence[State],
    losses: Losses | None = None,
    bad_steps: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, str]:
    """Return why a branch is unusable, by name; sound branches are left out.

    Args:
        names: Branch names.
        states: What would enter the merge.
        losses: The round's mean training losses, `{branch: {task: loss}}`, where they tell of the weights.
        bad_steps: The first step whose loss was not finite, `{branch: {task: step}}`.
    """
    faults = {}
    for name, state in zip(names, states, strict=True):
        lost = [task for task, loss in (losses or {}).get(name, {}).items() if not math.isfinite(loss)]
        if lost:
            steps = (bad_steps or {}).get(name, {})
            since = f" from step {min(steps.values())} on" if steps else ""
            faults[name] = f"its training loss of {', '.join(lost)} is not finite{since}"
        elif not state.is_finite():
            faults[name] = "it has parameters that are not finite"
    return faults
