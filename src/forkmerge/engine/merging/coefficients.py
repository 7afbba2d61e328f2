"""Coefficients of a merge: one per branch, non-negative, summing to 1."""

from __future__ import annotations

from collections.abc import Sequence

from forkmerge.errors import ProblemError

Coefficients = tuple[float, ...]
"""Λ: one coefficient per branch, non-negative, summing to 1."""


_SUM_TOLERANCE = 1e-6  # 1/3 typed as 0.3333333 must pass


def vertices(branches: int) -> list[Coefficients]:
    """Return e_1, …, e_B: each single branch as coefficients."""
    return [tuple(float(k == b) for k in range(branches)) for b in range(branches)]


def check_coefficients(coefficients: Sequence[float], branches: int | None = None) -> Coefficients:
    """Return the coefficients as floats if they are non-negative, sum to 1 and fit the number of branches."""
    try:
        values = tuple(float(value) + 0.0 for value in coefficients)  # + 0.0 turns -0.0 into 0.0
    except (TypeError, ValueError):
        raise ProblemError(f"coefficients must be numbers, one per branch, got {coefficients!r}.") from None
    if branches is not None and len(values) != branches:
        raise ProblemError(f"expected {branches} coefficients, one per branch, got {len(values)}: {values}.")
    # NaN fails the comparison, infinity the sum.
    if not all(value >= 0 for value in values) or abs(sum(values) - 1) > _SUM_TOLERANCE:
        raise ProblemError(
            f"coefficients must be finite, not negative and sum to 1, got {values}, "
            f"which sum to {sum(values):.7g}: divide non-negative numbers by their sum."
        )
    return values
