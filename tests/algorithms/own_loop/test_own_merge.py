"""Merges that are scored by the user's own function: a number, or one per example, which rules need."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import forkmerge as fm
from _asserts import assert_same_bits
from forked_training import BRANCHES, HELD_OUT, branch_bits, score, sgd, train
from problems import plain_net, seeded


def scores(model: nn.Module) -> Tensor:
    """One score per example."""
    inputs, labels = HELD_OUT
    return -cross_entropy(model(inputs, "tgt").double(), labels[:, 0], reduction="none")


def trained() -> fm.Fork:
    forked = fm.fork(model := seeded(plain_net), sgd(model), {**BRANCHES, "aux": {"tgt": 1.0, "aux": 0.5}}, seed=3)
    train(forked)
    return forked


def test_scores_of_examples_count_by_their_mean() -> None:
    forks = trained(), trained()
    outcomes = forks[0].merge(scores), forks[1].merge(lambda model: math.fsum(scores(model).tolist()) / 24)
    assert outcomes[0] == outcomes[1]
    for one, other in zip(*(branch_bits(forked).values() for forked in forks), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("rule", ["one_standard_error", "bagged"])
def test_a_rule_chooses_among_all_candidates_and_keeps_its_promise(rule: str) -> None:
    forked = trained()
    alone = {branch.name: scores(branch.model.eval()) for branch in forked}
    best = max(alone, key=lambda name: alone[name].mean().item())
    outcome = forked.merge(scores, rule=rule)
    assert any(all(value == pytest.approx(1 / 3) for value in c.values()) for c, _ in outcome.candidates)
    model = forked.merged_into(plain_net()).eval()
    assert scores(model).mean().item() == pytest.approx(outcome.score)
    difference = alone[best] - scores(model)
    assert difference.mean().item() <= difference.std().item() / math.sqrt(24) + 1e-9


def test_resamples_depend_on_the_seed_and_the_round_alone() -> None:
    assert trained().merge(scores, rule="bagged") == trained().merge(scores, rule="bagged")


@pytest.mark.parametrize(
    ("merge", "message"),
    [
        ({"score": score, "rule": "bagged"}, "let score return a tensor of one number per validation example"),
        ({"score": scores, "rule": "bagged", "search": "fixed"}, "fixed coefficients are not searched"),
        ({"score": scores, "rule": "mean"}, "'mean'"),
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused_and_the_branches_stay(merge: dict[str, Any], message: str) -> None:
    forked = trained()
    before = branch_bits(forked)
    with pytest.raises(fm.ProblemError, match=message):
        forked.merge(**merge)
    for name, kept in branch_bits(forked).items():
        assert_same_bits(kept, before[name])


def test_scores_of_other_examples_are_refused() -> None:
    sizes = iter([24, 23])
    with pytest.raises(fm.ProblemError, match="24 numbers for one candidate and 23 for another"):
        trained().merge(lambda model: scores(model)[: next(sizes)])


def test_no_scores_at_all_are_no_score() -> None:
    with pytest.raises(fm.ProblemError, match="one per example"):
        trained().merge(lambda model: torch.zeros(0))
