"""Figures of transfer: gains over λ, their matrix, gradients, distribution shift. Pure functions of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from forkmerge.analysis.results import (
    FeatureMap,
    GradientSimilarity,
    OneStepGains,
    ShiftCurve,
    TransferCurve,
    TransferMatrix,
)
from forkmerge.report.figure import MOST_LINES, Axis, Figure, Heat, Numbers, Panel, Series

_BINS = 30
_FIT_POINTS = 100  # more than a line marks
_MOST_FITS = 6  # λ of a scatter that are drawn at once
_MOST_MAPS = 4  # λ of a map in one row
_MOST_WRITTEN = 12  # columns of a heat map that leave room for numbers
_LAMBDA = "λ, weight of the auxiliary"


def numbers(values: Iterable[float | None]) -> Numbers:
    """Return numbers for a series: what is not finite leaves a gap."""
    return tuple(value if value is not None and math.isfinite(value) else None for value in values)


def band(means: Sequence[float], stds: Sequence[float | None], least: float = -math.inf) -> tuple[Numbers, Numbers]:
    """Return the ends of mean ± standard deviation; none where there is no such deviation somewhere."""
    pairs = [(mean, std) for mean, std in zip(means, stds, strict=bool(stds)) if std is not None]
    if len(pairs) < len(means):
        return (), ()
    return numbers(max(mean - std, least) for mean, std in pairs), numbers(mean + std for mean, std in pairs)


def signed(value: float, form: str = "+.2f") -> str:
    """Return a number with its sign."""
    return format(value, form).replace("-", "−")


def rows_if_many(panel: Panel, *, name: Callable[[float], str] | None = None, is_gain: bool = False) -> Panel:
    """Return a panel of lines, or of a heat map with a row for each where they are too many to tell apart.

    Args:
        panel: Of lines, or of steps of one width.
        name: Names the columns; without, they stand where the points do, evenly spaced.
        is_gain: Whether zero divides losses from gains.
    """
    lines = panel.series
    if len(lines) <= MOST_LINES:
        return panel
    positions = sorted({position for line in lines for position in line.x if position is not None})
    by_position = [dict(zip(line.x, line.y, strict=True)) for line in lines]
    rows = tuple(tuple(row.get(position) for position in positions) for row in by_position)
    half = (positions[1] - positions[0]) / 2 if lines[0].kind == "steps" else 0.0  # a step begins at its point
    middles = () if name else tuple(position + half for position in positions)
    heat = Heat(rows, x=middles, is_gain=is_gain, is_written=bool(name) and len(positions) <= _MOST_WRITTEN)
    x = replace(panel.x, labels=tuple(map(name, positions))) if name else panel.x
    return Panel(panel.title, x, Axis(labels=tuple(line.name for line in lines)), heat=heat)


def gain_curve(curves: Sequence[TransferCurve]) -> Figure:
    """TG(λ) of every auxiliary (Fig. 1)."""
    series = []
    for curve in curves:
        points = curve.points
        has_intervals = all(point.low is not None for point in points)
        series.append(
            Series(
                curve.auxiliary,
                numbers((0.0, *(point.weight for point in points))),
                numbers((0.0, *(point.mean for point in points))),
                numbers((0.0, *(point.low for point in points))) if has_intervals else (),
                numbers((0.0, *(point.high for point in points))) if has_intervals else (),
                texts=(curve.auxiliary,) * (len(points) + 1),
            )
        )
    target = curves[0].target if curves else ""
    many = len(curves) > MOST_LINES
    level = f"{curves[0].confidence:.0%}" if curves else ""
    legend = "Green is above zero, red below." if many else f"Bands: {level} intervals over paired seeds."
    caption = (
        f"Transfer gain TG(λ): score of {target} trained with an auxiliary of weight λ minus its score alone. Above "
        f"zero the auxiliary helps. {legend} A {'row' if many else 'curve'} that is negative for every λ > 0 is strong "
        "negative transfer; one that a smaller λ would lift above zero is weak."
    )
    panel = Panel("", Axis(_LAMBDA), Axis("transfer gain"), tuple(series))
    return Figure("gain", "Transfer gain over λ", caption, (rows_if_many(panel, name=_fraction, is_gain=True),))


def gain_matrix(matrices: Sequence[TransferMatrix]) -> Figure:
    """Auxiliaries × targets, one panel per algorithm with one scale for all (Fig. 5)."""
    sizes = [abs(cell.mean) for matrix in matrices for row in matrix.cells for cell in row if cell is not None]
    span = max((size for size in sizes if math.isfinite(size)), default=1.0) or 1.0
    panels = []
    for matrix in matrices:
        values = tuple(numbers(None if cell is None else cell.mean for cell in row) for row in matrix.cells)
        title = f"{matrix.algorithm}: {matrix.negatives} of {matrix.pairs} negative"
        written = len(matrix.targets) <= _MOST_WRITTEN
        heat = Heat(values, is_gain=True, is_written=written, span=span)
        x, y = Axis("target", labels=matrix.targets), Axis("auxiliary", labels=matrix.auxiliaries)
        panels.append(Panel(title, x, y, heat=heat))
    caption = (
        "Transfer gain of each auxiliary (row) on each target (column). As in the paper, blue and − is negative "
        "transfer, red and + positive; deeper colours are stronger."
    )
    return Figure("matrix", "Who helps whom", caption, tuple(panels), has_paper_colours=True)


def cosine_distribution(similarities: Sequence[GradientSimilarity]) -> Figure:
    """Distribution of the gradient cosine similarity, batch by batch (Fig. 8)."""
    cosines = [value for similarity in similarities for value in similarity.cosines if math.isfinite(value)]
    low, high = min(cosines, default=-1.0), max(cosines, default=1.0)
    width = max((high - low) / _BINS, 1e-6)
    edges = tuple(low + (position - 1) * width for position in range(_BINS + 3))
    series = []
    for similarity in similarities:
        shares = [0.0] * len(edges)
        for value in similarity.cosines:
            if math.isfinite(value):
                shares[min(int((value - low) / width), _BINS - 1) + 1] += 1 / len(similarity.cosines)
        series.append(Series(similarity.second, edges, tuple(shares), kind="steps"))
    caption = (
        "Share of batches by the cosine between the gradients of the target and an auxiliary; left of zero they "
        f"conflict. {_means(similarities)}"
    )
    panel = Panel("", Axis("gradient cosine similarity"), Axis("share of batches"), tuple(series))
    return Figure("cosines", "Do gradients conflict?", caption, (rows_if_many(panel),))


def _means(similarities: Sequence[GradientSimilarity]) -> str:
    words = {s.second: f"{s.second} {signed(s.mean)} ({s.conflicts:.0%} in conflict)" for s in similarities}
    if len(words) <= MOST_LINES:
        return f"Means: {', '.join(words.values())}."
    ranked = sorted((s for s in similarities if math.isfinite(s.mean)), key=lambda s: s.mean)
    return f"Lowest mean: {words[ranked[0].second]}; highest: {words[ranked[-1].second]}." if ranked else ""


def cosine_against_gain(experiments: Sequence[OneStepGains]) -> Figure:
    """TG after one step against GCS, a cubic fit per λ (Fig. 2)."""
    panels = []
    for experiment in experiments:
        cosines = [point.cosine for point in experiment.points]
        span = (min(cosines, default=-1.0), max(cosines, default=1.0))
        grid = [span[0] + (span[1] - span[0]) * i / _FIT_POINTS for i in range(_FIT_POINTS + 1)]
        series: list[Series] = []
        chosen = range(max(len(experiment.weights) - _MOST_FITS, 0), len(experiment.weights))
        for index in chosen:
            name = f"λ = {_fraction(experiment.weights[index])}"
            gains = numbers(point.gains[index] for point in experiment.points)
            series.append(Series(name, numbers(cosines), gains, kind="dots"))
            if experiment.fits[index]:
                fitted = tuple(sum(c * x**k for k, c in enumerate(experiment.fits[index])) for x in grid)
                series.append(Series(name, tuple(grid), numbers(fitted)))
        title = "L2 regularisation" if experiment.auxiliary == "l2" else experiment.auxiliary
        unit = "validation score" if experiment.measure == "score" else "minus validation loss"
        x, y = Axis("gradient cosine similarity"), Axis(f"gain in {unit}")
        panels.append(Panel(title, x, y, tuple(series)))
    caption = (
        "Every dot is one step from the same weights with another batch: how well the gradients agreed, and what the "
        f"auxiliary did to the target on validation data. Lines: cubic fits. {_correlation(experiments)}"
    )
    return Figure("conflict", "Does gradient conflict explain negative transfer?", caption, tuple(panels))


def _correlation(experiments: Sequence[OneStepGains]) -> str:
    correlations = [(e.auxiliary, [c for c in e.correlations if c is not None]) for e in experiments]
    shown = ", ".join(f"{name} {signed(fmean(values))}" for name, values in correlations if values)
    return f"Mean correlation of the two over λ: {shown}." if shown else ""


def _fraction(weight: float) -> str:
    """Return λ as the paper writes it, 1/16 for 0.0625."""
    inverse = 1 / weight if weight else 0.0
    return f"1/{inverse:.0f}" if inverse > 1 and abs(inverse - round(inverse)) < 1e-9 else f"{weight:g}"


def shift_curve(curves: Sequence[ShiftCurve]) -> Figure:
    """CSD(λ) with TG(λ) beside it (Fig. 3b)."""
    discrepancy, gain = [], []
    for curve in curves:
        weights = tuple(point.weight for point in curve.points)
        means = [point.mean for point in curve.points]
        ends = band(means, [point.std for point in curve.points])
        discrepancy.append(Series(curve.auxiliary, weights, numbers(means), *ends))
        gain.append(Series(curve.auxiliary, weights, numbers(point.gain for point in curve.points)))
    split = curves[0].split if curves else "validation"
    bands = "; bands: ± standard deviation" if len(curves) <= MOST_LINES else ""
    caption = (
        f"Confidence score discrepancy on {split} inputs of the target (1 minus the mean confidence{bands}) "
        "and transfer gain, both over λ. Where the discrepancy first falls and the gain is positive, the "
        "auxiliary brings the training distribution closer to the target's."
    )
    x = Axis(_LAMBDA)
    panels = (
        rows_if_many(Panel("confidence score discrepancy", x, Axis("CSD"), tuple(discrepancy)), name=_fraction),
        rows_if_many(Panel("transfer gain", x, Axis("transfer gain"), tuple(gain)), name=_fraction, is_gain=True),
    )
    return Figure("shift", "Does negative transfer follow the distribution shift?", caption, panels)


def feature_map(maps: Sequence[FeatureMap]) -> Figure:
    """t-SNE of the interpolated training distribution beside held-out data (Fig. 3a)."""
    panels = []
    for tsne in maps:
        x_axis, y_axis = (_scale(point[way] for panel in tsne.panels for point in panel.positions) for way in (0, 1))
        for panel in tsne.panels:
            series = []
            for origin in ("target", "auxiliary", "held-out"):
                mine = [i for i, name in enumerate(panel.origins) if name == origin]
                x = numbers(panel.positions[i][0] for i in mine)
                y = numbers(panel.positions[i][1] for i in mine)
                texts = tuple(f"class {panel.classes[i]}" for i in mine)
                series.append(Series(origin, x, y, kind="dots", texts=texts))
            title = f"{tsne.auxiliary}, λ = {_fraction(panel.weight)}"
            panels.append(Panel(title, x_axis, y_axis, tuple(series), is_square=True))
    caption = (
        "Features of the target-only model in two dimensions by t-SNE: training points of the target and of the "
        "auxiliary, mixed as λ mixes them, and held-out points of the target. The better they overlap, the closer the "
        "training distribution is to the target's."
    )
    across = min(max((len(tsne.panels) for tsne in maps), default=1), _MOST_MAPS)
    return Figure("features", "The training distribution under λ", caption, tuple(panels), across=across)


def _scale(values: Iterable[float]) -> Axis:
    """An axis that is not drawn, but one for several panels."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    edge = 0.05 * (max(finite) - min(finite)) or 1.0
    return Axis(low=min(finite) - edge, high=max(finite) + edge, is_hidden=True)
