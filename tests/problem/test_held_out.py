"""Validation examples kept from the search: they are in no other part of the problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.problem.held_out import hold_out_validation
from problems import shared_problem


def numbered(count: int = 20, **options: Any) -> fm.Problem:
    """A problem whose validation examples are told apart by their first number."""
    numbers = torch.arange(float(count))
    evaluation = fm.Evaluation(TensorDataset(numbers, numbers), fm.absolute_error, **options)
    return shared_problem(validation={"tgt": evaluation, "aux": evaluation})


def numbers_of(dataset: Any) -> list[float]:
    return [float(dataset[index][0]) for index in range(len(dataset))]


def test_held_out_examples_are_the_test_split_and_no_others_are_searched_with() -> None:
    problem = numbered()
    divided = hold_out_validation(problem, 0.2)
    held, searched = (numbers_of(divided.evaluations(split)["tgt"].dataset) for split in ("test", "validation"))
    assert len(held) == 4
    assert sorted(held + searched) == list(range(20))
    assert numbers_of(hold_out_validation(problem, 0.2).evaluations("test")["tgt"].dataset) == held
    assert divided.evaluations("validation")["aux"].size == 20


def test_a_refit_does_not_train_on_them() -> None:
    numbers = torch.arange(20.0)
    divided = hold_out_validation(numbered(as_training=TensorDataset(-numbers, numbers)), 0.25)
    refitted = divided.target_validation.as_training
    assert sorted(-number for number in numbers_of(refitted)) == numbers_of(divided.target_validation.dataset)
    assert divided.evaluations("test")["tgt"].as_training is None


@pytest.mark.parametrize("share", [0, 1, 1.5, -0.2, True, "a fifth", float("nan")])
def test_a_share_is_a_number_between_0_and_1(share: Any) -> None:
    with pytest.raises(fm.ProblemError, match="hold_out must be a share between 0 and 1"):
        hold_out_validation(numbered(), share)


def test_both_sides_keep_an_example() -> None:
    for share in (0.01, 0.99):
        with pytest.raises(fm.ProblemError, match="leaves nothing on one of both sides"):
            hold_out_validation(numbered(), share)


def test_a_test_split_is_not_replaced() -> None:
    problem = numbered()
    with pytest.raises(fm.ProblemError, match="the target 'tgt' has one"):
        hold_out_validation(replace(problem, test=problem.target_validation), 0.2)
