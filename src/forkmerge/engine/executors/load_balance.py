"""Which worker trains which steps of a round: as long as all workers stay busy, B branches on W workers take B/W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHORTEST = 0.04  # of the whole: a shorter piece would cost about what it saves


@dataclass(frozen=True)
class Part:
    """Steps that one worker trains in one go.

    Args:
        branch: Position of the branch.
        steps: How many.
        start: When they would start, in the units of the costs.
    """

    branch: int
    steps: int
    start: float


def divide(steps: Sequence[int], costs: Sequence[float], workers: int) -> list[Part]:
    """Return the parts of all branches in the order in which free workers should take them.

    McNaughton's wrap-around rule: with C = max(longest branch, all work / workers), lay the branches end to end and
    cut every C. At most W − 1 branches are cut, and the two parts of one never overlap: the one that begins the next
    worker's time is trained first. Where branches are cut changes no bit: training in segments of any length is
    training at once, and recorded losses are exact sums, rounded once.

    Args:
        steps: Steps per branch.
        costs: Time of a step, per branch.
        workers: W.

    References:
        McNaughton, "Scheduling with Deadlines and Loss Functions", 1959.

    Example:
        >>> [(part.branch, part.steps) for part in divide([10, 10, 10], [1, 1, 1], 2)]
        [(0, 10), (1, 5), (2, 10), (1, 5)]
    """
    work = [count * cost for count, cost in zip(steps, costs, strict=True)]
    whole = max([*work, sum(work) / workers])
    parts: list[Part] = []
    now = 0.0  # on the current worker's clock
    for branch in sorted(range(len(steps)), key=lambda index: -work[index]):
        late = now + work[branch] - whole
        moved = round(late / costs[branch])  # steps beyond this worker's time: the next one begins with them
        if late < _SHORTEST * whole or moved < 1:
            parts.append(Part(branch, steps[branch], now))
            now += work[branch]
        elif whole - now < _SHORTEST * whole or moved >= steps[branch]:
            parts.append(Part(branch, steps[branch], 0.0))
            now = work[branch]
        else:
            parts.append(Part(branch, moved, 0.0))
            parts.append(Part(branch, steps[branch] - moved, now))
            now = moved * costs[branch]
        if whole - now <= 1e-9 * whole:
            now = 0.0
    return sorted(parts, key=lambda part: part.start)  # stable: a branch's first part comes before its second
