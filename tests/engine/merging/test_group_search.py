"""Coefficients of layer groups, searched from those of the whole model."""

from __future__ import annotations

import random

from forkmerge.engine.merging.candidates import Candidates
from forkmerge.engine.merging.group_search import group_evaluations, search_groups
from forkmerge.engine.merging.layer_groups import expanded


def test_every_group_finds_its_own_branch() -> None:
    ideal = (1.0, 0.0, 0.0, 1.0, 0.5, 0.5)

    def score(point: tuple[float, ...]) -> float:
        return -sum((a - b) ** 2 for a, b in zip(expanded(point, 2, 3), ideal, strict=True))

    assert search_groups(Candidates(score), (0.0, 1.0), 3) == ideal
    assert search_groups(Candidates(score), (0.5, 0.5), 3) == ideal


def test_it_is_never_worse_than_where_it_began_and_scores_no_more_than_it_says() -> None:
    draw = random.Random(0)
    for _ in range(100):
        branches, groups = draw.randint(2, 4), draw.randint(2, 4)
        scores: dict[tuple[float, ...], float] = {}

        def score(point: tuple[float, ...], scores: dict[tuple[float, ...], float] = scores) -> float:
            return scores.setdefault(point, draw.random())

        start = tuple(1 / branches for _ in range(branches))
        candidates = Candidates(score)
        found = search_groups(candidates, start, groups)
        assert scores[found] == max(scores.values()) >= scores[start]
        assert len(scores) <= 1 + group_evaluations(branches, groups)


def test_of_equals_what_there_was_stays() -> None:
    assert search_groups(Candidates(lambda point: 1.0), (0.3, 0.7), 3) == (0.3, 0.7)


def test_sums_beyond_1_keep_their_total_in_every_group() -> None:
    tried: list[tuple[float, ...]] = []

    def score(point: tuple[float, ...]) -> float:
        tried.append(point)
        return float(len(point))

    search_groups(Candidates(score), (1.0, 0.5), 2)
    assert {round(sum(point[i : i + 2]), 9) for point in tried for i in range(0, len(point), 2)} == {1.5}
