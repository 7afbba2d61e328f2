"""The demo's one figure, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forkmerge.report.figure import Axis, Figure, Panel, Series

_ROUND_WIDTH = 0.76  # of the distance between two rounds, the rest is the gap


def coefficients_figure(methods: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Coefficients over rounds: a line through the means of each branch, and a dot per seed beside it.

    Args:
        methods: By the title of its panel, a method's `coefficients` (by seed, round and branch) and their
            `mean_coefficients` (by round and branch).
    """
    panels = []
    for title, method in methods.items():
        rounds = tuple(float(r + 1) for r in range(len(method["mean_coefficients"])))
        x = Axis("round", low=0.5, high=len(rounds) + 0.5, ticks=rounds)
        y = Axis("coefficient in the merge", low=-0.04, high=1.04)
        panels.append(Panel(title, x, y, tuple(_series(method["mean_coefficients"], method["coefficients"]))))
    count = max(len(method["coefficients"]) for method in methods.values())
    legend = f" (line: mean over {count} seeds; dot: one seed)" if count > 1 else ""
    return Figure("coefficients", f"How much of each branch the merges kept{legend}", "", tuple(panels))


def _series(means: Sequence[Mapping[str, float]], seeds: Sequence[Sequence[Mapping[str, float]]]) -> Iterator[Series]:
    slot = _ROUND_WIDTH / len(means[0])
    for position, branch in enumerate(means[0]):
        shift = (position - (len(means[0]) - 1) / 2) * slot
        x = [r + 1 + shift for r in range(len(means))]
        yield Series(branch, tuple(x), tuple(coefficients[branch] for coefficients in means))
        if len(seeds) > 1:
            values = [[rounds[r].get(branch, 0.0) for rounds in seeds] for r in range(len(means))]  # [rounds, seeds]
            across = [at + step for at, row in zip(x, values, strict=True) for step in _spread(row, 0.9 * slot)]
            yield Series(branch, tuple(across), tuple(value for row in values for value in row), kind="dots")


def _spread(values: Sequence[float], width: float) -> list[float]:
    """Shift equal values apart, within a width, so that every seed's dot can be seen."""
    keys = [round(value, 2) for value in values]
    step = width / max(len(values), 2)
    seen: dict[float, int] = {}
    shifts = []
    for key in keys:
        index = seen.get(key, 0)
        seen[key] = index + 1
        shifts.append((index - (keys.count(key) - 1) / 2) * step)
    return shifts
