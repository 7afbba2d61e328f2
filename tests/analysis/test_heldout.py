"""Losses and confidences on examples that were not trained on."""

from __future__ import annotations

import pytest
import torch

import forkmerge as fm
from forkmerge.analysis import heldout
from problems import domains_problem, evaluation, plain_net, seeded


def test_csd_is_one_minus_the_mean_largest_softmax():
    model, held = seeded(plain_net), evaluation(metrics=fm.accuracy, batch_size=7)
    inputs, _ = held.dataset.tensors
    expected = 1 - model(inputs).softmax(1).amax(1).mean().item()
    assert heldout.confidence_discrepancy(model, held) == pytest.approx(expected, abs=1e-6)


def test_confidences_of_probabilities_and_of_binary_probabilities():
    rows = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    assert heldout.class_confidence(rows, torch.tensor([0, 1])).tolist() == pytest.approx([0.8, 0.5])
    binary = heldout.class_confidence(torch.tensor([0.1, 0.7]), torch.tensor([0.0, 1.0]))
    assert binary.tolist() == pytest.approx([0.9, 0.7])
    with pytest.raises(fm.ProblemError, match="pass confidence="):
        heldout.class_confidence(torch.randn(4, 3), torch.randn(4, 3))


def test_the_loss_on_validation_examples_is_the_streams_own():
    model, problem = seeded(plain_net), domains_problem()
    inputs, labels = problem.target_validation.dataset.tensors
    expected = torch.nn.functional.cross_entropy(model(inputs), labels[:, 0]).item()
    assert heldout.heldout_loss(model, problem) == pytest.approx(expected, abs=1e-6)
    assert heldout.reads_heldout(model, problem)
