"""What a search cannot go by is refused before training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import TensorDataset

import forkmerge as fm
from problems import evaluation, fit, shared_problem


def recall(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    """The share of class 2 that is found; of none of it NaN."""
    return (predictions.argmax(1) == targets)[targets == 2].float().mean().item()


def rare(positives: int) -> fm.Problem:
    """Of 5,000 validation examples a few are of class 2."""
    held = evaluation(5000, metrics=recall)
    inputs, labels = held.dataset[:]
    labels = torch.where(torch.arange(5000) < positives, 2, 0).unsqueeze(1).expand_as(labels)
    return shared_problem(validation=replace(held, dataset=TensorDataset(inputs, labels)))


def test_a_sample_that_lacks_a_class_is_refused() -> None:
    sampled = fm.ForkMerge("mixed", validation_examples=50)
    with pytest.raises(fm.ProblemError, match=r"'recall' .* is NaN on the validation_examples=50 .*give more, or None"):
        fit(sampled, rare(5))
    assert 0 <= fit(sampled, rare(2500)).metrics["recall"] <= 1
    assert 0 <= fit(fm.ForkMerge("mixed"), rare(5)).metrics["recall"] <= 1


def test_rules_need_a_cost_of_every_example() -> None:
    with pytest.raises(fm.ProblemError, match="rule='bagged' compares candidates example by example"):
        fit(fm.ForkMerge("mixed", rule="bagged"), rare(2500))
    with pytest.raises(fm.ProblemError, match="confidence compares candidates example by example"):
        fit(fm.ForkMerge("mixed", confidence=0.9), rare(2500))
