"""Scores on validation data: on all examples, on a round's sub-sample, and of the state that is asked about."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.algorithms.validation import Validator
from forkmerge.engine.training.state import State
from problems import (
    SGD,
    Counted,
    evaluation,
    examples,
    fit,
    minus_loss,
    plain_net,
    predict_target,
    seeded,
    shared_problem,
)


def test_the_search_reads_the_sub_sample_and_the_winner_is_confirmed_on_all() -> None:
    seen: list[int] = []

    def predict(model: nn.Module, batch: Any) -> Any:
        seen.append(len(batch[0]))
        return predict_target(model, batch)

    validation = fm.Evaluation(TensorDataset(*examples(24, 2)), minus_loss, predict)
    problem = shared_problem(validation=validation)
    run = fit(fm.ForkMerge("mixed", interval=6, search_examples=7), problem, steps=6)
    # All examples: before training, two branches, a merged winner. Seven: two branches, four mixtures.
    merged = 0 < run.coefficients[0]["joint"] < 1
    assert seen.count(7) == 6
    assert seen.count(24) == 3 + merged
    assert run.score == fm.measure(run.model, validation)["minus_loss"]


def test_every_round_draws_its_own() -> None:
    data = Counted(24, 2)
    drawn: list[list[int]] = []

    def note(predictions: Any, targets: Any) -> float:
        drawn.append(targets.tolist())
        return minus_loss(predictions, targets)

    validation = fm.Evaluation(data, note, predict_target)
    fit(fm.ForkMerge("mixed", interval=4, search_examples=7), shared_problem(validation=validation), steps=8)
    assert len({tuple(labels) for labels in drawn if len(labels) == 7}) == 2


def test_a_run_on_an_error_makes_the_choices_of_a_run_on_the_score() -> None:
    def loss(predictions: Any, targets: Any) -> float:
        return -minus_loss(predictions, targets)

    algorithm = fm.ForkMerge("per_auxiliary", interval=4)
    down = shared_problem(validation=evaluation(metrics={"loss": loss}, higher_is_better={"loss": False}))
    up = fit(algorithm)
    turned = fit(algorithm, down)
    assert turned.coefficients == up.coefficients
    assert turned.score == up.score
    assert turned.metrics == {"loss": -up.metrics["minus_loss"]}


def test_a_metric_that_returns_nan_never_wins() -> None:
    """Every mixture of branches scores NaN: only single branches can be installed."""
    singles: list[torch.Tensor] = []

    def fragile(model: nn.Module, batch: Any) -> Any:
        weight = model.heads["tgt"].weight.detach().clone()
        if len(singles) <= 3:  # one call before training, then the branches on their own
            singles.append(weight)
        is_single = any(torch.equal(weight, single) for single in singles)
        logits, targets = predict_target(model, batch)
        return logits if is_single else logits * torch.nan, targets

    validation = fm.Evaluation(TensorDataset(*examples(24, 2)), minus_loss, fragile)
    run = fit(fm.ForkMerge("per_auxiliary", interval=4), shared_problem(validation=validation), steps=4)
    (only,) = run.rounds
    assert sorted(only.coefficients.values()) == [0.0, 0.0, 1.0]
    mixed = [c for c in only.candidates if max(c.coefficients.values()) < 1]
    assert mixed
    assert all(candidate.score is None for candidate in mixed)
    assert math.isfinite(run.score)


def test_a_branch_whose_metric_is_nan_gets_coefficient_zero_and_is_named() -> None:
    calls: list[int] = []

    def sometimes(predictions: Any, targets: Any) -> float:
        calls.append(1)
        return math.nan if len(calls) == 3 else minus_loss(predictions, targets)  # checks, alone, joint

    run = fit(problem=shared_problem(metrics={"m": sometimes}), steps=4)
    (only,) = run.rounds
    assert only.coefficients == {"alone": 1.0, "joint": 0.0}
    assert only.branches["joint"].fault == "its validation score is not finite"
    assert "round 1: branch 'joint' got coefficient 0: its validation score is not finite" in run.notes


def test_what_was_measured_of_a_state_is_not_believed_of_another_at_its_address() -> None:
    binding = fm.Training(SGD).binding(seeded(plain_net))
    validator = Validator(binding, shared_problem(), None, None, seed=0)
    first = binding.initial()
    validator.metrics(state := first.clone())
    assert set(validator.known_metrics(state)) == {"minus_loss"}
    address = id(state)
    del state
    other = State(0, {})  # which may get the address of the first, but not whenever a test would like it to
    validator._measured[id(other)] = validator._measured[address]
    assert validator.known_metrics(other) == {}
    assert validator.seconds([other]) == 0.0
