"""What ranking and search take of a round's training, counted in examples: a note of much, and a sample that is little.

A step is worth three forward passes of its examples, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from forkmerge.algorithms.settings import Settings
from forkmerge.engine.merging.rules import ARGMAX
from forkmerge.engine.training.options import Mixture
from forkmerge.problem.definition import Problem
from forkmerge.problem.searched_evaluation import of_every_example

LEAST = 256
"""Validation examples that a search always may see: with fewer it would soon be noise that decides."""
_PASSES_OF_STEP, _MUCH = 3, 0.1


def affordable_examples(settings: Settings, problem: Problem, steps: int) -> int | None:
    """Return how many validation examples make ranking and search a tenth of training; None where all of them do.

    Never fewer than `LEAST`. A step has one micro-batch here, and layers have coefficients in common.
    """
    mixtures = settings.rotation(problem).first()
    ranked, candidates = _passes(settings, len(mixtures), 1)
    count = max(LEAST, int(_MUCH * _trained(settings, problem, mixtures, steps, 1) / (ranked + candidates)))
    return count if count < problem.target_validation.size else None


def search_notes(
    settings: Settings, problem: Problem, mixtures: Sequence[Mixture], steps: int, accumulate: int, groups: int
) -> list[str]:
    """Say it where searches see a sample, and where a rule makes ranking and search take more than a tenth of training.

    Args:
        settings: The options.
        problem: The problem, as searches see it.
        mixtures: The branches of the first round.
        steps: T.
        accumulate: Micro-batches per step.
        groups: How many groups of layers have coefficients of their own.
    """
    size, every = problem.target_validation.size, of_every_example(problem.target_validation).size
    notes = []
    if size < every:
        notes.append(
            f"scores of rounds are of {size} of the {every} validation examples, which ranking and search see; that of "
            "the model returned is of all"
        )
    if settings.rule == ARGMAX or len(mixtures) < 2:
        return notes
    trained = _trained(settings, problem, mixtures, steps, accumulate)
    ranked, candidates = _passes(settings, len(mixtures), groups)
    seen = min(settings.search_examples or size, size)
    share = (ranked * size + candidates * seen) / trained
    if share > _MUCH:
        fewer = int((_MUCH * trained - ranked * size) / candidates)
        advice = f"search_examples={fewer}" if fewer >= 2 else "a longer interval, or fewer validation_examples,"
        notes.append(
            f"rule={settings.rule!r} looks at {seen} validation examples for each of up to {candidates} candidates: "
            f"ranking and search take about {share:.0%} of training; {advice} makes it {_MUCH:.0%}"
        )
    return notes


def _trained(settings: Settings, problem: Problem, mixtures: Sequence[Mixture], steps: int, accumulate: int) -> float:
    """Return what a round trains, in forward passes of examples."""
    per_step = sum(_examples_of_step(problem, mixture) for mixture in mixtures)
    return _PASSES_OF_STEP * per_step * accumulate * settings.interval_of(steps)


def _examples_of_step(problem: Problem, mixture: Mixture) -> float:
    """Return how many examples a step of a branch reads, where it draws a stream or a task on average."""
    active = [stream for stream in problem.stream_map.values() if mixture.active(stream.tasks)]
    if problem.weights == "sampling":
        shares = [sum(mixture.task_weights.get(task, 0.0) for task in stream.tasks) for stream in active]
        sizes = (share * stream.batch_size for share, stream in zip(shares, active, strict=True))
        return sum(sizes) / sum(shares)
    others = [stream.batch_size for stream in active if problem.target not in stream.tasks]
    drawn = len(others) if mixture.auxiliary_streams == "one" and others else 1
    return sum(stream.batch_size for stream in active) - sum(others) + sum(others) / drawn


def _passes(settings: Settings, branches: int, groups: int) -> tuple[int, int]:
    """Return how many passes a merge takes at most: over what is ranked, and over candidates."""
    entrants = settings.entrants(branches)
    ranked = entrants + (branches if settings.average_iterates else 0)
    return ranked, settings.evaluations(branches, groups) - entrants + 1
