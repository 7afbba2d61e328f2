"""Which single-task training a method is compared with: one whose model is selected alike: only transfer counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forkmerge.algorithms import Algorithm, ForkMerge
from forkmerge.algorithms.settings import Settings
from forkmerge.experiments.compared.method_words import BASELINE
from forkmerge.experiments.compared_methods import (
    SELECTING,
    ComparedMethod,
    compared_method_from,
    with_setting,
)
from forkmerge.experiments.recipe import Recipe
from forkmerge.methods.option_syntax import show_options

References = Mapping[str, Mapping[str, str]]
"""`{method: {what tuning chose of options that select: word of its single-task training}}`; others: the baseline."""


def steps_between_choices(algorithm: Algorithm, steps: int) -> int | None:
    """Return how often, in steps, validation may choose which weights are used; None if the last ones always are.

    Args:
        algorithm: What is trained.
        steps: T.
    """
    inner = getattr(algorithm, "algorithm", algorithm)
    every = None
    if isinstance(inner, ForkMerge) and inner.checkpoint != "last":
        every = inner.validate_every_of(steps)
    elif getattr(inner, "select", "last") == "best":
        every = Settings(interval=getattr(inner, "interval", None)).interval_of(steps)
    return every if every is not None and every < steps else None


def selecting(setting: Mapping[str, Any]) -> str:
    """Return what a tuned setting says about selection, as text: the key of `References`."""
    return show_options({key: value for key, value in setting.items() if key in SELECTING})


def reference_word(recipe: Recipe, algorithm: Algorithm, *, is_tuned: bool = False) -> str:
    """Return the word of the single-task training whose model is selected as an algorithm's.

    Args:
        recipe: The problem and how it is trained on.
        algorithm: What is compared.
        is_tuned: Whether tuning may choose how the baseline's model is selected, so that it is nobody's reference.
    """
    every = steps_between_choices(algorithm, recipe.steps)
    words = [BASELINE, f"{BASELINE}[select={'last' if every is None else 'best'}]"]
    for word in words[is_tuned:]:
        if steps_between_choices(compared_method_from(word).algorithm(recipe, refit=False), recipe.steps) == every:
            return word
    return f"{BASELINE}[interval={every},select=best]"


def with_references(
    recipe: Recipe, methods: Sequence[ComparedMethod], settings: Callable[[ComparedMethod], list[dict[str, Any]]]
) -> tuple[tuple[ComparedMethod, ...], References]:
    """Return the methods and the single-task trainings they are to be compared with, and which belongs to which.

    Args:
        recipe: The problem and how it is trained on.
        methods: The methods, the baseline first.
        settings: What tuning tries for a method.
    """
    references: dict[str, dict[str, str]] = {}
    is_tuned = len({selecting(setting) for setting in settings(methods[0])}) > 1
    for method in methods:
        if method.word == BASELINE:
            continue
        prepared = method.prepare(recipe, refit=False)
        algorithms = {selecting(each): with_setting(prepared, each).algorithm for each in settings(method)}
        own = {key: reference_word(recipe, each, is_tuned=is_tuned) for key, each in algorithms.items()}
        if set(own.values()) != {BASELINE}:
            references[method.word] = own
    added = dict.fromkeys(word for own in references.values() for word in own.values())
    present = {method.word for method in methods}
    new = [compared_method_from(word) for word in added if word not in present]
    return (*methods[:1], *new, *methods[1:]), references
