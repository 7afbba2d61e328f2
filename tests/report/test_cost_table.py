"""The table of what a comparison would cost."""

from __future__ import annotations

from dataclasses import replace

from forkmerge.experiments.cost_of_comparison import ComparedMethodCost, ComparisonCost, PretrainingCost
from forkmerge.report.cost_table import cost_table

METHODS = [
    ComparedMethodCost("stl", "STL", 1, 4, 0, 40, 20.0, 2_000_000),
    ComparedMethodCost("forkmerge", "ForkMerge", 2, 4, 8, 240, 120.0, 5_000_000),
]
COST = ComparisonCost(METHODS, ["a", "b"], [0, 1], 2, 16, 280, 7200.0, 10_000_000)


def test_every_method_has_a_row_and_the_sum_a_note() -> None:
    table = cost_table(COST)
    assert table.texts() == [
        ["STL", "1", "4", "0", "40", "20 s", "2 MB"],
        ["ForkMerge", "2", "4", "8", "240", "2 min", "5 MB"],
    ]
    assert table.notes[0].startswith("2 methods × 2 targets × 2 seeds: 16 runs, 280 training steps")
    assert "about 2.0 h with 2 processes" in table.notes[1]
    assert "on 'a'; about 10 MB of memory" in table.notes[1]


def test_pretraining_comes_first_or_is_done() -> None:
    before = PretrainingCost("problem:recipe", 30, 50.0, is_done=False)
    done = replace(before, seconds=0.0, is_done=True)
    notes = [cost_table(replace(COST, pretraining=each)).notes[0] for each in (before, done)]
    assert notes == [
        "Pre-training on problem:recipe, 30 steps, comes first: about 50 s.",
        "Pre-training on problem:recipe, 30 steps, is done already.",
    ]
