"""What a search cannot go by is refused before training: scores that do not add up, and samples without a metric."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from forkmerge.engine.merging.rules import ARGMAX
from forkmerge.errors import ProblemError
from forkmerge.problem.definition import Evaluation, Problem
from forkmerge.problem.metrics import NotPerExample
from forkmerge.problem.scoring import cost_reader, measure
from forkmerge.problem.searched_evaluation import of_every_example


def check_costs(settings: Any, validation: Evaluation, model: nn.Module, seed: int) -> None:
    """Refuse options that compare candidates example by example where the score of a search does not add up."""
    asked = {"confidence": settings.confidence is not None, f"rule={settings.rule!r}": settings.rule != ARGMAX}
    option = next((name for name, is_asked in asked.items() if is_asked), None)
    if option is None:
        return
    reader = cost_reader(validation, seed)
    has_costs = reader is not None and reader.falls_with_costs
    if reader is not None and has_costs:
        try:
            reader.read(model, range(reader.chunk))
        except NotPerExample:
            has_costs = False
    if not has_costs:
        raise ProblemError(
            f"{option} compares candidates example by example, so it needs metrics that add up over examples, such as "
            "fm.accuracy or fm.nll: measure those, pass search_by='nll', or leave it out."
        )


def check_sample(problem: Problem, model: nn.Module, seed: int) -> None:
    """Refuse so few of the validation examples that a metric, which all of them have, is none of theirs."""
    sample = problem.target_validation
    if of_every_example(sample) is sample:
        return
    for name, value in measure(model, sample, seed=seed).items():
        if math.isnan(value):
            raise ProblemError(
                f"metric {name!r} of the target {problem.target!r} is NaN on the validation_examples={sample.size} "
                "that searches would see, and is a number on all of them: give more, or None, which sees all."
            )
