"""Figures of merges and methods: coefficients, learning curves, combinations, losses, costs. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from forkmerge.analysis.merge_results import (
    CoefficientHistory,
    CombinationGains,
    IntervalEffect,
    LearningCurve,
    LossLine,
    LossPlane,
    MethodCost,
    ParetoProjection,
)
from forkmerge.report.figure import Axis, Figure, Heat, Panel, Series
from forkmerge.report.transfer_figures import band, numbers, rows_if_many, signed

_MOST_SHOWN = 6  # methods whose curves are drawn before somebody asks for the others
_MOST_WRITTEN, _LONGEST_WRITTEN = 8, 14  # names beside dots, and characters of one


def coefficients_over_rounds(histories: Mapping[str, CoefficientHistory]) -> Figure:
    """Coefficients of every branch over rounds (Fig. 9).

    Args:
        histories: By the title of their panel: a target, a method.
    """
    panels = [
        _shares(title, history.steps, history.means, history.stds if history.runs > 1 else {}, "coefficient")
        for title, history in histories.items()
    ]
    runs = max((history.runs for history in histories.values()), default=1)
    caption = (
        "Coefficient of every branch in the merge at the end of each round. They sum to 1; 0 means refused, or that it "
        "was another branch's turn."
    )
    if runs > 1:
        caption += f" Means over {runs} seeds, ± standard deviation."
    return Figure("coefficients", "What each merge took", caption, tuple(panels))


def relevance_over_rounds(histories: Mapping[str, CoefficientHistory]) -> Figure:
    """Weight λ of every auxiliary that a merge amounts to, over rounds; by the title of the panel."""
    panels = []
    for title, history in histories.items():
        auxiliaries = {task: values for task, values in history.relevance.items() if task != history.target}
        panels.append(_shares(title, history.steps, auxiliaries, {}, "λ"))
    caption = (
        "What the merges amount to as task weights: the weight of an auxiliary in a branch, times the branch's "
        "coefficient, summed over branches. 0 is a task that the merge ignored, or whose branch did not have its turn."
    )
    before = tuple(dict.fromkeys(name for history in histories.values() for name in history.branches))
    return Figure("relevance", "How much each auxiliary counted", caption, tuple(panels), before)


def _shares(
    title: str,
    steps: Sequence[int],
    means: dict[str, tuple[float, ...]],
    stds: dict[str, tuple[float, ...]],
    what: str,
) -> Panel:
    series = []
    for name, values in means.items():
        series.append(Series(name, tuple(steps), numbers(values), *band(values, stds.get(name, ()), least=0.0)))
    top = max((v for values in means.values() for v in values if math.isfinite(v)), default=1.0)
    axis = Axis(what, low=-0.03, high=max(top, 1.0) * 1.04)
    return rows_if_many(Panel(title, Axis("step"), axis, tuple(series)))


def learning_curves(curves: Sequence[LearningCurve], shown: Sequence[str] = ()) -> Figure:
    """Validation score over steps, mean ± standard deviation over seeds, one panel per target (Fig. 11).

    Args:
        curves: The curves of all methods and targets.
        shown: Labels drawn at first; the others wait for a click. Empty: the first few.
    """
    labels = list(dict.fromkeys(curve.label for curve in curves))
    at_first = set(shown or labels[:_MOST_SHOWN]) if len(labels) > _MOST_SHOWN else set(labels)
    panels = []
    for target in dict.fromkeys(curve.target for curve in curves):
        series = []
        for curve in (curve for curve in curves if curve.target == target):
            ends = band(curve.means, curve.stds if curve.runs > 1 else ())
            line = Series(curve.label, curve.steps, numbers(curve.means), *ends, is_shown=curve.label in at_first)
            series.append(line)
        metric = next(curve.metric for curve in curves if curve.target == target)
        panels.append(Panel(target, Axis("step"), Axis(f"validation {metric}"), tuple(series)))
    caption = (
        "Validation score of the target during training; bands: ± standard deviation over seeds. The score of several "
        "metrics is their mean relative change against single-task training."
    )
    errors = dict.fromkeys(curve.metric for curve in curves if curve.metric != "score")
    if errors:
        caption += f" Lower is better of {', '.join(errors)}."
    if len(at_first) < len(labels):
        caption += " Click on a name to add its curve."
    return Figure("learning", "Learning curves", caption, tuple(panels))


def interval_effect(effects: Sequence[IntervalEffect]) -> Figure:
    """What Δt does to the result (Fig. 7)."""
    panels = []
    for effect in effects:
        ends = band(effect.means, effect.stds if max(effect.runs, default=1) > 1 else ())
        line = Series("ForkMerge", effect.intervals, numbers(effect.means), *ends)
        panels.append(
            Panel(
                effect.target,
                Axis("Δt, steps between merges", is_log=True, ticks=effect.intervals),
                Axis(effect.metric),
                (line,),
            )
        )
    caption = (
        "The same run with other intervals between merges. Short ones judge branches before their tasks have shown "
        "what they do; long ones let branches drift too far apart to be merged."
    )
    return Figure("interval", "Effect of the interval Δt", caption, tuple(panels))


def cost_per_method(costs: Sequence[MethodCost]) -> Figure:
    """Time of every method, and what it buys (Fig. 10)."""
    timed = [cost for cost in costs if cost.time is not None]
    labels = tuple(cost.label for cost in timed)
    texts = tuple(_cost_words(cost) for cost in timed)
    bars = Series(
        "", numbers(cost.time for cost in timed), tuple(float(i) for i in range(len(timed))), kind="bars", texts=texts
    )
    both = [cost for cost in timed if cost.change is not None]
    # Beside dots, many names or long ones would cover each other: there the numbers of the rows stand for them.
    fits = len(both) <= _MOST_WRITTEN and all(len(label) <= _LONGEST_WRITTEN for label in labels)
    shown = labels if fits or not both else tuple(f"{i} {label}" for i, label in enumerate(labels, 1))
    panels = [Panel("time", Axis("time, × single-task training"), Axis(labels=shown), (bars,))]
    if both:
        dots = Series(
            "",
            numbers(cost.time for cost in both),
            numbers(cost.change for cost in both),
            kind="dots",
            labels=tuple(cost.label if fits else str(timed.index(cost) + 1) for cost in both),
            texts=tuple(_cost_words(cost) for cost in both),
        )
        panels.append(Panel("gain for the time", Axis("time, ×", is_log=True), Axis("Δ_m", is_percent=True), (dots,)))
    caption = "Seconds of all branches, tuning included, as a ratio to single-task training."
    if both and not fits:
        caption += " The numbers beside the dots are those before the names on the left."
    return Figure("cost", "What each method costs", caption, tuple(panels))


def _cost_words(cost: MethodCost) -> str:
    parts = [cost.label, f"{cost.branches} branch{'es' * (cost.branches != 1)}"]
    if cost.memory is not None:
        parts.append(f"{cost.memory:+.1f} model sizes")
    return ", ".join(parts)


def pareto_projections(projections: Sequence[ParetoProjection]) -> Figure:
    """Scores of two tasks at a time, grid search beside methods (Fig. 12)."""
    panels = []
    for projection in projections:
        grid = [point for point in projection.points if point.is_grid]
        front = sorted((point for point in projection.points if point.is_front), key=lambda point: point.x)
        series = []
        if len(front) > 1:
            line = Series("front", numbers(p.x for p in front), numbers(p.y for p in front), is_reference=True)
            series.append(line)
        if grid:
            texts = tuple(point.label for point in grid)
            dots = Series("grid", numbers(p.x for p in grid), numbers(p.y for p in grid), kind="dots", texts=texts)
            series.append(dots)
        for point in projection.points:
            if not point.is_grid:
                series.append(Series(point.label, (point.x,), (point.y,), kind="dots", texts=(point.label,)))
        panels.append(Panel("", Axis(projection.first), Axis(projection.second), tuple(series)))
    caption = (
        "One task against another, each by its first metric or, where lower is better, by 1 / that; up and to the "
        "right is better. Dashed: what nothing else beats in both, among the points of a grid search where there is "
        "one: then numbers are of validation data."
    )
    return Figure("pareto", "Trade-offs between tasks", caption, tuple(panels))


def combination_gains(mixtures: Sequence[CombinationGains]) -> Figure:
    """Transfer gain of every mixture of two models (a line), or of three (a triangle) (Fig. 6)."""
    panels, words = [], []
    for gains in mixtures:
        panels.append(_mixed_two(gains) if len(gains.names) == 2 else _mixed_three(gains))
        shares = zip(gains.names, gains.coefficients[gains.best], strict=True)
        best = ", ".join(f"{value:.2f} {name}" for name, value in shares if value)
        words.append(f"{best}, {signed(gains.gains[gains.best], '+.4g')}")
    caption = f"Transfer gain of weighted averages of trained models. Best: {'; '.join(words)}."
    if any(len(gains.names) > 2 for gains in mixtures):
        caption += " As in the paper, red is a gain and blue a loss; the numbers of the colour bar have signs."
    return Figure("mixture", "Mixtures of models", caption, tuple(panels), has_paper_colours=True)


def _mixed_two(mixture: CombinationGains) -> Panel:
    line = Series("gain", numbers(point[1] for point in mixture.coefficients), numbers(mixture.gains))
    x = Axis(f"coefficient of {mixture.names[1]} (rest: {mixture.names[0]})")
    return Panel("", x, Axis("transfer gain"), (line,))


def _mixed_three(mixture: CombinationGains) -> Panel:
    corners = ((0.0, 0.0), (1.0, 0.0), (0.5, math.sqrt(3) / 2))
    x, y = zip(*(_inside(corners, point) for point in mixture.coefficients), strict=True)
    texts = tuple(
        ", ".join(f"{n} {c:.2f}" for n, c in zip(mixture.names, point, strict=True)) + f": {signed(gain, '+.4g')}"
        for point, gain in zip(mixture.coefficients, mixture.gains, strict=True)
    )
    dots = Series("gain", x, y, kind="dots", values=numbers(mixture.gains), texts=texts)
    # One by one, so that no line joins them; below or above the corners, where no dot is.
    names = (
        Series("", (x,), (y + 0.05 if y else -0.05,), labels=(name,), is_below=not y, is_reference=True)
        for name, (x, y) in zip(mixture.names, corners, strict=True)
    )
    across, up = Axis(low=-0.3, high=1.3, is_hidden=True), Axis(low=-0.4, high=1.2, is_hidden=True)
    return Panel("", across, up, (dots, *names), is_square=True)


def _inside(corners: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    return (
        sum(w * corner[0] for w, corner in zip(weights, corners, strict=True)),
        sum(w * corner[1] for w, corner in zip(weights, corners, strict=True)),
    )


def loss_lines(lines: Sequence[LossLine]) -> Figure:
    """The target's loss between pairs of models."""
    series = [Series(" – ".join(line.names), line.positions, numbers(line.losses)) for line in lines]
    worst = max((line.barrier for line in lines), default=0.0)
    caption = (
        "The target's validation loss on straight lines between models. A hump is a barrier: the two do not lie in one "
        f"basin, and averaging them costs loss. Highest barrier: {worst:.3g}."
    )
    panel = Panel("", Axis("from the first (0) to the second (1)"), Axis("loss of the target"), tuple(series))
    return Figure("line", "Loss between models", caption, (panel,))


def loss_plane(planes: Sequence[LossPlane]) -> Figure:
    """The target's loss on planes through three models each."""
    panels = []
    for plane in planes:
        rows = tuple(numbers(row) for row in plane.losses)
        positions = {**dict(zip(plane.names, plane.corners, strict=True)), **plane.marks}
        dots = tuple(Series(name, (x,), (y,), kind="dots", texts=(name,)) for name, (x, y) in positions.items())
        axis = Axis("distance of parameters")
        panels.append(Panel("", axis, axis, dots, Heat(rows, x=plane.xs, y=plane.ys), is_square=True))
    caption = "The target's validation loss on the plane through three models, by colour; the bar says which is high."
    return Figure("plane", "Loss around three models", caption, tuple(panels))
