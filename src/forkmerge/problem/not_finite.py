"""Which example of a stream's batches holds a number that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from forkmerge.problem.definition import Stream
from forkmerge.problem.example_order import batch_indices


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
