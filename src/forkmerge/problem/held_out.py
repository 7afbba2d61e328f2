"""Validation examples that a search never sees, so that they can say in the end whether a run helped."""

from __future__ import annotations

from dataclasses import replace

from forkmerge.errors import ProblemError, is_number
from forkmerge.problem.definition import Problem
from forkmerge.problem.split_dataset import part


def hold_out_validation(problem: Problem, share: float) -> Problem:
    """Return the problem with a share of the target's validation examples in the place of its missing test split.

    The same examples every time. A refit does not train on them either.

    Args:
        problem: A problem whose target has no test split.
        share: Between 0 and 1; at least one example stays on either side.
    """
    if not is_number(share) or not 0 < share < 1:
        raise ProblemError(f"hold_out must be a share between 0 and 1, such as 0.2, got {share!r}.")
    target, evaluation = problem.target, problem.target_validation
    if target in problem.evaluations("test"):
        raise ProblemError(f"hold_out takes the place of a missing test split, and the target {target!r} has one.")
    count = round(share * evaluation.size)
    if not 0 < count < evaluation.size:
        raise ProblemError(
            f"hold_out={share!r} of {evaluation.size} validation examples leaves nothing on one of both sides."
        )
    searched, held = part(evaluation.dataset, count)
    as_training = None if evaluation.as_training is None else part(evaluation.as_training, count)[0]
    return replace(
        problem,
        validation={
            **problem.evaluations("validation"),
            target: replace(evaluation, dataset=searched, as_training=as_training),
        },
        test={**problem.evaluations("test"), target: replace(evaluation, dataset=held, as_training=None)},
    )
