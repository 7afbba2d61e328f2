"""Combinations of saved branches, scored: each is evaluated once."""

from __future__ import annotations

import pytest
import torch

import forkmerge as fm
from forkmerge.analysis.combination_scores import CombinationScores
from forkmerge.engine.merging.blend import Blender
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.problem.metrics import Criterion
from problems import SGD, evaluation, minus_loss, plain_net, seeded


@pytest.fixture
def scores() -> CombinationScores:
    model = seeded(plain_net)
    binding = ModelBinding(model, SGD(model))
    first = binding.initial()
    second = first.clone()
    for row in second.rows.values():
        row += torch.linspace(-0.5, 0.5, row.numel())
    blend = Blender(binding, [first, second], first.clone())
    return CombinationScores(blend, Criterion({"nll": -1}), (1.0, 0.0), 0)


def test_a_table_of_costs_gives_the_scores_on_all_examples_and_on_some(scores: CombinationScores) -> None:
    data, points = evaluation(metrics=fm.nll), [(1.0, 0.0), (0.5, 0.5)]
    for indices in (None, [3, 5, 8, 20]):
        table = scores.table(data, indices, points)
        means = table.costs.sum(1) / table.counts.sum(0) * table.slopes
        assert means.flatten().tolist() == pytest.approx([scores.scorer(data, indices)(point) for point in points])
        scores.blend.binding.attach_weights(scores.blend((0.5, 0.5)))
        measured = fm.measure(scores.blend.binding.model, data, indices=indices)["nll"]
        assert scores.scorer(data, indices)((0.5, 0.5)) == pytest.approx(-measured, abs=1e-6)


def test_a_metric_that_does_not_add_up_has_no_table(scores: CombinationScores) -> None:
    assert scores.table(evaluation(metrics=minus_loss), None, [(1.0, 0.0)]) is None
    turned = evaluation(metrics=fm.nll, higher_is_better={"nll": True})
    assert scores.table(turned, None, [(1.0, 0.0)]) is None


def test_several_metrics_of_other_data_are_compared_with_the_reference_branch(scores: CombinationScores) -> None:
    data = evaluation(metrics={"accuracy": fm.accuracy, "nll": fm.nll})
    assert scores.scorer(data, None)((1.0, 0.0)) == 0
