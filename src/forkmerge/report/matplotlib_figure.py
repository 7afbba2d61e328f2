"""From a figure to a PDF, SVG or PNG by matplotlib, which is imported only when something is drawn."""

from __future__ import annotations

import math
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from forkmerge.engine.storage.atomic_files import replacing
from forkmerge.errors import ConfigError, unknown_name
from forkmerge.report.colours import GAIN, NEGATIVE, POSITIVE, SHARE, style
from forkmerge.report.figure import Axis, Figure, Panel, Series
from forkmerge.report.plotly_figure import shorten

FORMATS = ("pdf", "svg", "png")
_LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_MOST_MARKERS = 40  # points of a line that are marked
_MOST_NAMES = 60  # names on an axis before they would overlap
_MUTED = "0.45"


def draw(figure: Figure, path: Path) -> None:
    """Write a figure; the ending of its name says in which form."""
    form = path.suffix.lstrip(".").lower()
    if form not in FORMATS:
        raise ConfigError("--out: " + unknown_name("form of a figure", path.name, [f"fig.{name}" for name in FORMATS]))
    if find_spec("matplotlib") is None:
        raise ConfigError("figures are drawn by matplotlib: pip install 'forkmerge[report]'.")
    from matplotlib import rc_context  # and not plotly's own export, which needs a browser
    from matplotlib.figure import Figure as Canvas  # not pyplot: no window system, no global state

    # Names are text, never formulas; letters stay letters in PDF and SVG.
    with rc_context({"text.parse_math": False, "svg.fonttype": "none", "pdf.fonttype": 42, "font.size": 9}):
        across = min(len(figure.panels), figure.across)
        down = -(-len(figure.panels) // across)
        height = max(_height(panel) for panel in figure.panels)
        canvas = Canvas(figsize=(max(4.2 * across, 5.2), height * down + 0.6), layout="constrained")
        axes = canvas.subplots(down, across, squeeze=False).ravel()
        styles = figure.styles
        handles: dict[str, Any] = {}
        for axis, panel in zip(axes, figure.panels, strict=False):
            _draw_panel(canvas, axis, panel, styles, handles)
        for axis in axes[len(figure.panels) :]:
            axis.set_visible(False)
        if len(handles) > 1:
            # A name that begins with "_" would be left out of a legend.
            names = [f" {name}" if name.startswith("_") else name for name in map(shorten, handles)]
            canvas.legend(handles.values(), names, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
        canvas.suptitle(figure.title, fontsize=11)
        with replacing(path) as unfinished, unfinished.open("xb") as file:
            canvas.savefig(file, format=form, dpi=200)


def _height(panel: Panel) -> float:
    return min(0.28 * len(panel.y.labels) + 1.2, 10.0) if panel.y.labels else 3.2


def _draw_panel(canvas: Any, axis: Any, panel: Panel, styles: dict[str, int], handles: dict[str, Any]) -> None:
    if panel.heat is not None:
        _draw_heat(canvas, axis, panel)
    for series in panel.series:
        if series.is_shown:
            drawn = _draw_series(canvas, axis, panel, series, styles)
            if series.name and not series.is_reference:
                handles.setdefault(series.name, drawn)
    if len(panel.title) > 0:
        axis.set_title(shorten(panel.title, 40), fontsize=10)
    _dress(axis, "x", panel.x)
    _dress(axis, "y", panel.y)
    if panel.y.labels:
        axis.set_ylim(len(panel.y.labels) - 0.5, -0.5)
    if panel.is_square:
        axis.set_aspect("equal")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if panel.x.is_hidden and panel.y.is_hidden:
        axis.set_axis_off()
    elif panel.heat is None:
        axis.grid(axis="x" if panel.is_sideways else "both", color="0.92", linewidth=0.7)
        axis.set_axisbelow(True)


def _draw_series(canvas: Any, axis: Any, panel: Panel, series: Series, styles: dict[str, int]) -> Any:
    colour, marker, dash = style(styles.get(series.name, 0))
    x, y = _floats(series.x), _floats(series.y)
    for text, at_x, at_y in zip(series.labels, x, y, strict=False):
        axis.annotate(text, (at_x, at_y), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8)
    if series.is_reference:
        return axis.plot(x, y, color=_MUTED, linewidth=1, linestyle="--")[0]
    colours: Any = [_sign_colour(value) for value in series.values] if series.values and panel.is_sideways else colour
    if series.kind == "bars":
        return (
            axis.barh(y, x, color=colours) if panel.is_sideways else axis.bar(x, y, color=colours, width=0.8 * _gap(x))
        )
    if series.kind == "dots":
        if series.low:
            ends = [
                [m - low, high - m]
                for m, low, high in zip(
                    x if panel.is_sideways else y, _floats(series.low), _floats(series.high), strict=True
                )
            ]
            error = {"xerr" if panel.is_sideways else "yerr": list(zip(*ends, strict=True))}
            axis.errorbar(x, y, fmt="none", ecolor=_MUTED, capsize=2.5, linewidth=1, **error)
        if series.values and not panel.is_sideways:
            return _draw_gains(canvas, axis, series, x, y)
        style_options = {"s": 14, "alpha": 0.65, "linewidths": 0} if panel.is_crowded(series) else {"s": 30}
        return axis.scatter(x, y, c=colours, marker=marker, zorder=3, **style_options)
    if series.low:
        axis.fill_between(x, _floats(series.low), _floats(series.high), color=colour, alpha=0.15, linewidth=0)
    shape = {"drawstyle": "steps-post"} if series.kind == "steps" else {}
    marked = marker if len(x) <= _MOST_MARKERS and series.kind == "line" else None
    return axis.plot(x, y, color=colour, linestyle=_LINES[dash], marker=marked, markersize=4, linewidth=1.5, **shape)[0]


def _draw_gains(canvas: Any, axis: Any, series: Series, x: list[float], y: list[float]) -> Any:
    values = _floats(series.values)
    span = max((abs(value) for value in values if value == value), default=0.0) or 1.0
    side = 215 / max(math.sqrt(2 * len(x)) - 1, 1)  # points between two of them in a triangle of usual size
    cells = {"marker": "h", "s": (1.15 * side) ** 2, "linewidths": 0}
    drawn = axis.scatter(x, y, c=values, cmap=_scale(GAIN), vmin=-span, vmax=span, **cells)
    canvas.colorbar(drawn, ax=axis, shrink=0.85)
    return drawn


def _draw_heat(canvas: Any, axis: Any, panel: Panel) -> None:
    heat = panel.heat
    assert heat is not None
    rows = [_floats(row) for row in heat.values]
    span = heat.span or max((abs(v) for row in rows for v in row if v == v), default=0.0) or 1.0
    low = -span if heat.is_gain else 0.0
    scale = _scale(GAIN if heat.is_gain else SHARE)
    columns = list(heat.x) or list(range(len(panel.x.labels)))
    half = (columns[1] - columns[0]) / 2 if len(columns) > 1 else 0.5
    bottom, top = (heat.y[0], heat.y[-1]) if heat.y else (-0.5, len(rows) - 0.5)
    extent = (columns[0] - half, columns[-1] + half, bottom, top)
    image = axis.imshow(
        rows, cmap=scale, vmin=low, vmax=span, aspect="auto", extent=extent, origin="lower", interpolation="nearest"
    )
    canvas.colorbar(image, ax=axis, shrink=0.85)
    if heat.is_written:
        form = ("{:+.1%}" if panel.y.is_percent else "{:+.2g}") if heat.is_gain else "{:.2f}"
        for row, values in enumerate(rows):
            for column, value in enumerate(values):
                if value == value:
                    dark = abs(value) > 0.6 * span
                    text = form.format(value).replace("-", "−")
                    axis.text(
                        columns[column],
                        row,
                        text,
                        ha="center",
                        va="center",
                        color="white" if dark else "0.15",
                        fontsize=7,
                    )


def _dress(axis: Any, way: str, about: Axis) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, PercentFormatter, StrMethodFormatter

    getattr(axis, f"set_{way}label")(about.title)
    line = getattr(axis, f"{way}axis")
    if about.is_log:
        getattr(axis, f"set_{way}scale")("log")
        line.set_major_locator(LogLocator(subs=(1, 2, 5)))
        line.set_major_formatter(StrMethodFormatter("{x:g}"))  # the usual 10ⁿ would be a formula
        line.set_minor_locator(NullLocator())
        line.set_minor_formatter(NullFormatter())
    if about.labels:
        every = -(-len(about.labels) // _MOST_NAMES)
        positions = list(range(0, len(about.labels), every))
        turned = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if way == "x" else {}
        getattr(axis, f"set_{way}ticks")(
            positions, [shorten(about.labels[position]) for position in positions], **turned
        )
        axis.tick_params(axis=way, length=0)
    elif about.ticks:
        getattr(axis, f"set_{way}ticks")(about.ticks)
    if about.is_percent and not about.labels:
        line.set_major_formatter(PercentFormatter(1.0))
    if about.low is not None and about.high is not None:
        getattr(axis, f"set_{way}lim")(about.low, about.high)
    elif not about.labels and not about.is_hidden and not axis.images and _has_zero(axis, way):
        getattr(axis, "axvline" if way == "x" else "axhline")(0, color="0.6", linewidth=0.8)


def _has_zero(axis: Any, way: str) -> bool:
    low, high = getattr(axis, f"get_{way}lim")()
    return bool(low < 0 < high)


def _scale(stops: tuple[tuple[float, str], ...]) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("forkmerge", list(stops))


def _sign_colour(value: float | None) -> str:
    return _MUTED if not value else POSITIVE if value > 0 else NEGATIVE


def _gap(x: list[float]) -> float:
    return min((b - a for a, b in pairwise(x) if b > a), default=1.0)


def _floats(values: tuple[float | None, ...]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]
