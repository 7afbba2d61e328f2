"""Sums that do not depend on where they are cut."""

from __future__ import annotations

import math
from collections.abc import Iterable


def add_exactly(parts: Iterable[float], values: Iterable[float]) -> list[float]:
    """Add values to a sum kept as numbers that do not overlap, without any rounding.

    The list is the exact sum of all values ever added, so `rounded` of it is the same however the values were
    grouped. Once a value is not finite, the sum is not either.

    References:
        Shewchuk, "Adaptive Precision Floating-Point Arithmetic", 1997.

    Example:
        >>> add_exactly([1e16], [1.0, -1e16])
        [1.0]
    """
    kept = list(parts)
    for value in values:
        if not math.isfinite(value) or not all(map(math.isfinite, kept)):
            kept = [sum(kept) + value]
            continue
        old, kept = kept, []
        for other in old:
            large, small = (value, other) if abs(value) >= abs(other) else (other, value)
            value = large + small
            rest = small - (value - large)
            if rest:
                kept.append(rest)
        kept.append(value)
    return [value for value in kept if value] or [0.0]


def rounded(parts: Iterable[float]) -> float:
    """Return a sum rounded once."""
    held = list(parts)
    return math.fsum(held) if all(map(math.isfinite, held)) else sum(held)
