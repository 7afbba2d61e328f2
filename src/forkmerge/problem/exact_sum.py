"""Sums that do not depend on where they are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable


def add_exactly(parts: Iterable[float], values: Iterable[float]) -> list[float]:
    """Add values to a sum kept as numbers that do not overlap, without any rounding.

    The list is the exact sum of all values ever added, so `rounded` of it is the same however the values were
    grouped. Once a value is not finite, the sum is not either.

    Example:
        >>> add_exactly([1e16], [1.0, -1e16])
        [1.0]
    """
    rest, total = [*parts, *values], []
    if not all(map(math.isfinite, rest)):
        return [sum(rest)]
    # What is left after the largest part is taken away is found exactly again, until nothing is left.
    while part := rounded(rest):
        total.append(part)
        if not math.isfinite(part):
            break
        rest.append(-part)
    return total or [0.0]


def rounded(parts: Iterable[float]) -> float:
    """Return a sum rounded once; infinite where it is too large."""
    numbers = list(parts)
    try:
        return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
    except OverflowError:
        return sum(numbers)


def sum_of_parts(values: Iterable[float]) -> Callable[[Iterable[float]], float]:
    """Return what sums any part of some non-negative numbers like `rounded`, without its care where that is not needed.

    Example:
        >>> sum_of_parts([0.1, 0.2, math.inf]) is rounded
        True
    """
    return math.fsum if math.isfinite(rounded(values)) else rounded
