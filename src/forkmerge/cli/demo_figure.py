"""Figures drawn from plain numbers; matplotlib is imported only here, and only when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from forkmerge.report.colours import STYLES

_ROUND_WIDTH = 0.76  # of the distance between two rounds, the rest is the gap

Coefficients = Sequence[Sequence[Mapping[str, float]]]
"""By seed, by round, by branch."""


def draw_coefficients(panels: Mapping[str, Coefficients], path: Path, *, title: str, note: str = "") -> None:
    """Write a PNG of the coefficients over rounds: a dot per seed, and a line through the means of each branch.

    Args:
        panels: `{panel's title: coefficients}`, drawn side by side.
        path: The file to write.
        title: Over all panels.
        note: Small print below them.
    """
    # The figure's own canvas, not pyplot: no window system, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8 * len(panels), 4.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    names = dict.fromkeys(branch for coefficients in panels.values() for branch in coefficients[0][0])
    styles = {name: STYLES[place % len(STYLES)] for place, name in enumerate(names)}  # one per branch in all panels
    for axis, (name, coefficients) in zip(axes, panels.items(), strict=True):
        _draw_branches(axis, coefficients, styles)
        _dress(axis, name, len(coefficients[0]), len(coefficients[0][0]))
    axes[0].set_ylabel("coefficient in the merge")
    figure.suptitle(title, fontsize=13)
    if note:
        figure.supxlabel(note, fontsize=8.5, color="0.35")
    figure.savefig(path, dpi=150, format="png")


def _draw_branches(axis: Any, coefficients: Coefficients, styles: Mapping[str, tuple[str, str]]) -> None:
    branches = list(coefficients[0][0])
    rounds = range(1, len(coefficients[0]) + 1)
    slot = _ROUND_WIDTH / len(branches)
    for place, branch in enumerate(branches):
        colour, marker = styles[branch]
        at = [r + (place - (len(branches) - 1) / 2) * slot for r in rounds]
        values = [[seed[r - 1].get(branch, 0.0) for seed in coefficients] for r in rounds]  # [rounds, seeds]
        for x, found in zip(at, values, strict=True):
            across = [x + shift for shift in _spread(found, slot * 0.9)]
            axis.scatter(across, found, s=17, color=colour, alpha=0.42, linewidths=0, zorder=2)
        means = [mean(found) for found in values]
        axis.plot(at, means, color=colour, linewidth=1.6, zorder=3)
        axis.plot(at, means, marker, color=colour, markersize=8, markeredgecolor="white", label=branch, zorder=4)


def _dress(axis: Any, name: str, rounds: int, branches: int) -> None:
    for r in range(1, rounds):
        axis.axvline(r + 0.5, color="0.9", linewidth=0.8, zorder=1)
    axis.set_title(name, fontsize=11)
    axis.set_xlabel("round")
    axis.set_xticks(range(1, rounds + 1))
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(0.5, rounds + 0.5)
    axis.set_ylim(-0.04, 1.04)
    axis.grid(axis="y", color="0.92", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=branches, frameon=False)


def _spread(values: Sequence[float], width: float) -> list[float]:
    """Shift equal values apart, within a width, so that every seed's dot can be seen."""
    keys = [round(value, 2) for value in values]
    step = width / max(len(values), 2)
    seen: dict[float, int] = {}
    shifts = []
    for key in keys:
        place = seen.get(key, 0)
        seen[key] = place + 1
        shifts.append((place - (keys.count(key) - 1) / 2) * step)
    return shifts
