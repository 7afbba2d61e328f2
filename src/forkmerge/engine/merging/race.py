"""The exact best-first race: the best of several candidates, each evaluated only as far as that takes.

`docs/race.md` defines what is exact and proves it.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence


class Entrant(ABC):
    """A candidate whose score becomes known bit by bit.

    Attributes:
        bound: The highest score it may still have; its score once it is complete. It never rises.
        is_complete: Whether nothing is left to evaluate.
    """

    bound: float
    is_complete: bool

    @abstractmethod
    def extend(self) -> None:
        """Evaluate the next part."""

    @abstractmethod
    def ask(self) -> None:
        """Note that the whole score was asked for."""

    @abstractmethod
    def lose(self, winner: float, *, is_preferred: bool) -> None:
        """Note that a candidate of the given score won; at equal scores this one would have, if it is preferred."""


class ScoredEntrant(Entrant):
    """A candidate whose score is known; NaN counts as minus infinity."""

    def __init__(self, score: float) -> None:
        self.bound, self.is_complete = -math.inf if math.isnan(score) else float(score), True

    def extend(self) -> None:
        """Do nothing: there is nothing left."""

    def ask(self) -> None:
        """Do nothing: it took no evaluation."""

    def lose(self, winner: float, *, is_preferred: bool) -> None:
        """Do nothing: it took no evaluation."""


def race(entrants: Sequence[Entrant]) -> int:
    """Return the position of the entrant with the highest score, of equals the first.

    Always extends the one with the highest bound, of equals the first, and stops when that one is complete: nobody
    else can reach more, and nobody before it as much.
    """
    distinct: dict[int, int] = {}  # an entrant given twice runs once, where it comes first
    for position, entrant in enumerate(entrants):
        distinct.setdefault(id(entrant), position)
    queue = [(-entrants[position].bound, position) for position in distinct.values()]
    heapq.heapify(queue)
    while not entrants[queue[0][1]].is_complete:
        position = queue[0][1]
        entrants[position].extend()
        heapq.heapreplace(queue, (-entrants[position].bound, position))
    first = queue[0][1]
    entrants[first].ask()
    for position in distinct.values():
        if position != first:
            entrants[position].lose(entrants[first].bound, is_preferred=position < first)
    return first
