"""The slow twin of the race: every candidate to its end."""

from __future__ import annotations

from collections.abc import Sequence

from forkmerge.engine.merging.race import Entrant


def full_loop(entrants: Sequence[Entrant]) -> int:
    """The twin of `race`: every candidate to its end, then the first of the best."""
    for entrant in entrants:
        while not entrant.is_complete:
            entrant.extend()
    return max(range(len(entrants)), key=lambda i: entrants[i].bound)
