"""The race returns what the full loop returns, having looked at less."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import permutations

from forkmerge.engine.merging.race import Entrant, ScoredEntrant, race
from forkmerge.problem.exact_sum import rounded
from race_twin import full_loop


class Listed(Entrant):
    """A candidate whose costs are written down."""

    def __init__(self, costs: Sequence[float], step: int) -> None:
        self.costs, self.step, self.done = costs, step, 0
        self.bound, self.is_complete = 0.0, not costs
        self.calls: list[object] = []

    def extend(self) -> None:
        assert not self.is_complete
        self.done += self.step
        self.bound, self.is_complete = -rounded(self.costs[: self.done]), self.done >= len(self.costs)

    def ask(self) -> None:
        self.calls.append("asked")

    def lose(self, winner: float, *, is_preferred: bool) -> None:
        self.calls.append((winner, is_preferred))


COSTS = (0.0, 0.0, 1.0, 1.0, 0.1, 0.3, 1e-30, 1e30, math.inf)


class TestTheRaceItself:
    def test_it_is_the_argmax_of_the_full_loop_ties_included(self) -> None:
        for seed in range(300):
            draw = random.Random(seed)
            values = draw.choice([COSTS, (0.0, 1.0), (0.0,), (math.inf,), (0.0, 0.1, 0.2, 0.3)])
            size, count, step = draw.choice([1, 2, 7, 40]), draw.randint(1, 8), draw.randint(1, 5)
            table = [[draw.choice(values) for _ in range(size)] for _ in range(count)]
            if draw.random() < 0.3:
                table = [table[0]] * count
            first = race([Listed(costs, step) for costs in table])
            assert first == full_loop([Listed(costs, step) for costs in table]), seed

    def test_a_complete_leader_ends_it_before_anybody_is_extended(self) -> None:
        others = [Listed([1.0, 1.0], 1), Listed([0.0, 0.0], 1)]
        assert race([ScoredEntrant(0.0), *others]) == 0
        assert [other.done for other in others] == [0, 0]
        assert race([others[0], ScoredEntrant(0.0)]) == 1  # it would win a tie, so one cost has to be seen
        assert others[0].done == 1

    def test_an_entrant_given_twice_runs_once(self) -> None:
        for order in set(permutations([0, 0, 1, 1, 2])):
            entrants = [Listed(costs, 1) for costs in ([3.0, 0.0], [1.0, 0.0], [0.0, 1.0])]
            assert race([entrants[i] for i in order]) == min(order.index(1), order.index(2)), order

    def test_what_was_evaluated_before_is_not_evaluated_again(self) -> None:
        slow, fast = Listed([1.0] * 9, 1), Listed([0.0] * 9, 1)
        race([slow, ScoredEntrant(-3.5)])
        assert slow.done == 4
        race([slow, fast])
        assert (slow.done, fast.done) == (4, 9)

    def test_the_winner_is_asked_and_the_others_lose_once_each_knowing_whether_they_are_preferred(self) -> None:
        entrants = [Listed(costs, 1) for costs in ([1.0, 0.0], [0.5, 0.0], [0.5, 0.0])]
        assert race([entrants[0], *entrants]) == 2
        assert [entrant.calls for entrant in entrants] == [[(-0.5, True)], ["asked"], [(-0.5, False)]]


def test_a_score_that_is_known_is_complete_and_nan_the_lowest() -> None:
    for score, bound in [(0.5, 0.5), (3, 3.0), (math.nan, -math.inf), (math.inf, math.inf), (-math.inf, -math.inf)]:
        entrant = ScoredEntrant(score)
        entrant.extend()
        entrant.ask()
        entrant.lose(1.0, is_preferred=True)
        assert (entrant.bound, entrant.is_complete) == (bound, True)
        assert type(entrant.bound) is float
