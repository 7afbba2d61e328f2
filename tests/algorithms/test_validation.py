"""Scores on validation data: on all examples, on a round's sub-sample, and of the state that is asked about."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from problems import Counted, examples, fit, minus_loss, predict_target, shared_problem


def test_the_search_reads_the_sub_sample_and_the_winner_is_confirmed_on_all() -> None:
    seen: list[int] = []

    def predict(model: nn.Module, batch: Any) -> Any:
        seen.append(len(batch[0]))
        return predict_target(model, batch)

    validation = fm.Evaluation(TensorDataset(*examples(24, 2)), minus_loss, predict)
    problem = shared_problem(validation=validation)
    run = fit(fm.ForkMerge(interval=6, search_examples=7), problem, steps=6)
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
    fit(fm.ForkMerge(interval=4, search_examples=7), shared_problem(validation=validation), steps=8)
    assert len({tuple(labels) for labels in drawn if len(labels) == 7}) == 2
