"""The area under the ROC curve beside pairs counted one by one, and beside torchmetrics."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import TensorDataset
from torchmetrics.functional.classification import binary_auroc

import forkmerge as fm


def by_pairs(scores: torch.Tensor, targets: torch.Tensor) -> float:
    """The definition: every pair of a positive and a negative example."""
    positive, negative = scores[targets == 1].tolist(), scores[targets == 0].tolist()
    wins = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    return sum(wins) / len(wins)


def test_it_is_the_share_of_pairs_in_the_right_order() -> None:
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        scores = torch.randint(-4, 5, (40,), generator=draw).float()  # many ties
        targets = torch.randint(0, 2, (40,), generator=draw)
        assert fm.auc(scores, targets) == pytest.approx(by_pairs(scores, targets), abs=1e-12)
        assert fm.auc(scores, targets) == pytest.approx(binary_auroc(scores.sigmoid(), targets).item(), abs=1e-6)


def test_logits_that_a_sigmoid_would_saturate_are_told_apart() -> None:
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 2, (500,), generator=draw)
    logits = 25 + torch.randn(500, generator=draw) + targets
    assert fm.auc(logits, targets) == pytest.approx(by_pairs(logits, targets), abs=1e-12)
    assert abs(fm.auc(logits.sigmoid(), targets) - fm.auc(logits, targets)) > 0.05


def test_all_forms_of_a_head_give_the_same() -> None:
    scores, targets = torch.tensor([0.1, 2.0, -1.0, 0.3]), torch.tensor([0, 1, 0, 1])
    both = torch.stack([-scores, scores], 1)
    values = [fm.auc(scores, targets), fm.auc(scores.unsqueeze(1), targets.unsqueeze(1).float()), fm.auc(both, targets)]
    assert values == [1.0, 1.0, 1.0]


def test_one_class_or_a_prediction_of_nan_is_no_number() -> None:
    assert math.isnan(fm.auc(torch.zeros(3), torch.zeros(3)))
    assert math.isnan(fm.auc(torch.tensor([math.nan, 0.0]), torch.tensor([0, 1])))


def test_what_it_cannot_mean_is_refused() -> None:
    with pytest.raises(fm.ProblemError, match=r"\[n\] or \[n, 1\], or those of two classes, \[n, 2\], got \(4, 3\)"):
        fm.auc(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(fm.ProblemError, match="0 or 1, got"):
        fm.auc(torch.zeros(2), torch.tensor([0, 2]))
    with pytest.raises(fm.ProblemError, match="one target per prediction"):
        fm.auc(torch.zeros(2), torch.zeros(3))


def test_it_is_a_metric_of_an_evaluation() -> None:
    scores, targets = torch.tensor([[0.1], [2.0], [-1.0], [0.3]]), torch.tensor([0, 1, 0, 1])
    evaluation = fm.Evaluation(TensorDataset(scores, targets), fm.auc, batch_size=2)
    assert evaluation.directions == {"auc": 1}
    assert fm.measure(torch.nn.Identity(), evaluation) == {"auc": 1.0}
