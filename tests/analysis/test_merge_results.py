"""Results about merges."""

from __future__ import annotations

from forkmerge.analysis.merge_results import CombinationGains


def test_the_best_combination_is_the_first_of_the_highest_gains() -> None:
    points = ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0))
    assert CombinationGains(("a", "b"), points, (0.1, 0.3, 0.3), (0.0, 0.2, 0.2)).best == 1
    assert CombinationGains(("a", "b"), points, (0.3, 0.2, 0.1), (0.0, -0.1, -0.2)).best == 0
