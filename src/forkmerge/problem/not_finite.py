"""Which example of a stream, or of an evaluation, holds a number that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from forkmerge.problem.definition import Evaluation, Stream
from forkmerge.problem.example_order import batch_indices
from forkmerge.problem.scoring import measure


def example_not_finite(name: str, stream: Stream, positions: Iterable[int], seed: int) -> int | None:
    """Return the first example with a number that is not finite; None where there is none.

    Args:
        name: The stream's name.
        stream: The stream.
        positions: Which batches are looked through, counted from the first of the run.
        seed: The seed of the order.
    """
    for position in positions:
        for index in batch_indices(stream.size, stream.batch_size, position, seed, name).tolist():
            if not all(_numbers_are_finite(stream.dataset[index])):
                return int(index)
    return None


def measure_and_find(model: nn.Module, evaluation: Evaluation, seed: int) -> tuple[dict[str, float], int | None]:
    """Return every metric's value, and the first example with a number that is not finite and a prediction of NaN.

    A metric such as accuracy counts that prediction as an error, or as class 0, and gives a number all the same.
    """
    has_nan = False

    def predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        nonlocal has_nan
        predictions, targets = evaluation.predict(model, batch)
        has_nan = has_nan or any(_has_nan(predictions))
        return predictions, targets

    watched = replace(evaluation, predict=predict)
    values = measure(model, watched, seed=seed)
    if not has_nan:
        return values, None
    for index in range(evaluation.size):
        if not all(_numbers_are_finite(evaluation.dataset[index])):  # which may be a label that is missing
            has_nan = False
            measure(model, replace(watched, metrics={"none": lambda *_: 0.0}, higher_is_better={}), indices=[index])
            if has_nan:
                return values, index
    return values, None


def _has_nan(value: Any) -> Iterator[bool]:
    if isinstance(value, Tensor):
        yield value.is_floating_point() and bool(value.isnan().any())
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _has_nan(item)


def _numbers_are_finite(value: Any) -> Iterator[bool]:
    if isinstance(value, Tensor):
        yield not value.is_floating_point() or bool(value.isfinite().all())
    elif isinstance(value, np.ndarray | np.floating):
        yield value.dtype.kind != "f" or bool(np.isfinite(value).all())
    elif isinstance(value, float):
        yield math.isfinite(value)
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers_are_finite(item)
