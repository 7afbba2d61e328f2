"""Task relevance: how much each task weighed in a merge."""

from __future__ import annotations

import pytest

from forkmerge.engine.merging.relevance import task_relevance
from forkmerge.engine.training.options import Mixture


def test_a_task_weighs_the_sum_over_branches_of_coefficient_times_task_weight() -> None:
    mixtures = [
        Mixture("alone", {"tgt": 1.0}),
        Mixture("joint", {"tgt": 1.0, "aux": 0.5}),
        Mixture("other", {"aux": 2.0, "odd": 3.0}),
    ]
    relevance = task_relevance({"alone": 0.5, "joint": 0.3, "other": 0.2}, mixtures)
    assert relevance == {"tgt": pytest.approx(0.8), "aux": pytest.approx(0.55), "odd": pytest.approx(0.6)}


def test_a_branch_without_a_coefficient_weighs_nothing_but_its_tasks_are_named() -> None:
    mixtures = [Mixture("alone", {"tgt": 1.0}), Mixture("lost", {"tgt": 1.0, "odd": 3.0})]
    assert task_relevance({"alone": 1.0}, mixtures) == {"tgt": 1.0, "odd": 0.0}
    assert task_relevance({}, mixtures) == {"tgt": 0.0, "odd": 0.0}
