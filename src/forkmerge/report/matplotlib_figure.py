"""From a figure to a PDF, SVG or PNG by matplotlib, which is imported only when something is drawn."""

from __future__ import annotations

import math
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from forkmerge.engine.storage.atomic_files import replacing
from forkmerge.errors import ConfigError, unknown_name
from forkmerge.report.colours import (
    CHANGES,
    GAIN,
    GAIN_MARKER,
    LEVEL_MARKER,
    LOSS,
    LOSS_MARKER,
    PAPER,
    SHARE,
    style,
)
from forkmerge.report.figure import Axis, Figure, Panel, Series
from forkmerge.report.label_lines import columns, label_lines

Scale = tuple[tuple[float, str], ...]
FORMATS = ("pdf", "svg", "png")
_LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_MOST_MARKERS = 40  # points of a line that are marked
_MOST_NAMES = 60  # names on an axis before they would overlap
_MUTED, _SIGNED = "0.45", "%+g"
_NAMES, _TITLE, _BESIDE = 28, 44, 16  # letters of a line: names on an axis, titles of a panel, names beside a point
_LETTER = 0.085  # inches, of a title


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
        width = max(4.2 * across, 5.2)
        canvas = Canvas(figsize=(width, height * down + 0.6), layout="constrained")
        axes = canvas.subplots(down, across, squeeze=False).ravel()
        styles = figure.styles
        handles: dict[str, Any] = {}
        scale = PAPER if figure.has_paper_colours else CHANGES
        for axis, panel in zip(axes, figure.panels, strict=False):
            _draw_panel(canvas, axis, panel, styles, handles, scale)
        for axis in axes[len(figure.panels) :]:
            axis.set_visible(False)
        if len(handles) > 1:
            _draw_legend(canvas, width, handles)
        canvas.suptitle(_wrapped(figure.title, int(width / _LETTER)), fontsize=11)
        with replacing(path) as unfinished, unfinished.open("xb") as file:
            # The paper is as large as what is drawn: a name that reaches over its panel is not cut.
            canvas.savefig(file, format=form, dpi=200, bbox_inches="tight", pad_inches=0.06)


def _wrapped(text: str, longest: int) -> str:
    return "\n".join(label_lines(text, longest))


def _height(panel: Panel) -> float:
    if not panel.y.labels:
        return 3.2
    lines = max(len(label_lines(label, _NAMES)) for label in panel.y.labels)
    return 0.28 * max(1.0, 0.6 * lines) * min(len(panel.y.labels), _MOST_NAMES) + 1.2


def _draw_legend(canvas: Any, width: float, handles: dict[str, Any]) -> None:
    # A name that begins with "_" would be left out of a legend.
    names = [f" {name}" if name.startswith("_") else name for name in (_wrapped(name, _NAMES) for name in handles)]
    longest = max(columns(line) for name in names for line in name.split("\n"))
    beside = max(1, min(4, len(names), int(width / (_LETTER * longest + 0.6))))
    canvas.legend(handles.values(), names, loc="outside lower center", ncols=beside, frameon=False)


def _draw_panel(
    canvas: Any, axis: Any, panel: Panel, styles: dict[str, int], handles: dict[str, Any], scale: Scale
) -> None:
    if panel.heat is not None:
        _draw_heat(canvas, axis, panel, scale)
    for series in panel.series:
        if series.is_shown:
            drawn = _draw_series(canvas, axis, panel, series, styles, scale)
            if series.name and not series.is_reference:
                handles.setdefault(series.name, drawn)
    if len(panel.title) > 0:
        axis.set_title(_wrapped(panel.title, _TITLE), fontsize=10)
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


def _draw_series(canvas: Any, axis: Any, panel: Panel, series: Series, styles: dict[str, int], scale: Scale) -> Any:
    colour, marker, dash = style(styles.get(series.name, 0))
    x, y = _floats(series.x), _floats(series.y)
    for text, at_x, at_y in zip(series.labels, x, y, strict=False):
        _write(axis, _wrapped(text, _BESIDE), at_x, at_y, below=series.is_below)
    if series.is_reference:
        return axis.plot(x, y, color=_MUTED, linewidth=1, linestyle="--")[0]
    signs = [_sign(value) for value in series.values] if panel.is_sideways else []
    if series.kind == "bars":
        colours: Any = [each for each, _ in signs] or colour
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
            return _draw_gains(canvas, axis, series, x, y, scale)
        size: dict[str, Any] = {"s": 14, "alpha": 0.65, "linewidths": 0} if panel.is_crowded(series) else {"s": 30}
        if panel.heat is not None:
            size["edgecolors"] = "white"
        for at_x, at_y, (each, sign) in zip(x, y, signs, strict=False):
            axis.scatter([at_x], [at_y], c=each, marker=sign, zorder=3, s=34)
        return None if signs else axis.scatter(x, y, c=colour, marker=marker, zorder=3, **size)
    if series.low:
        axis.fill_between(x, _floats(series.low), _floats(series.high), color=colour, alpha=0.15, linewidth=0)
    shape = {"drawstyle": "steps-post"} if series.kind == "steps" else {}
    marked = marker if len(x) <= _MOST_MARKERS and series.kind == "line" else None
    return axis.plot(x, y, color=colour, linestyle=_LINES[dash], marker=marked, markersize=4, linewidth=1.5, **shape)[0]


def _write(axis: Any, text: str, x: float, y: float, *, below: bool) -> None:
    where = {"xytext": (0, -5 if below else 5), "va": "top" if below else "bottom"}
    axis.annotate(text, (x, y), textcoords="offset points", ha="center", fontsize=8, annotation_clip=False, **where)


def _draw_gains(canvas: Any, axis: Any, series: Series, x: list[float], y: list[float], scale: Scale) -> Any:
    values = _floats(series.values)
    span = max((abs(value) for value in values if value == value), default=0.0) or 1.0
    side = 215 / max(math.sqrt(2 * len(x)) - 1, 1)  # points between two of them in a triangle of usual size
    cells = {"marker": "h", "s": (1.15 * side) ** 2, "linewidths": 0}
    drawn = axis.scatter(x, y, c=values, cmap=_scale(scale), vmin=-span, vmax=span, **cells)
    canvas.colorbar(drawn, ax=axis, shrink=0.85, format=_SIGNED)
    return drawn


def _draw_heat(canvas: Any, axis: Any, panel: Panel, changes: Scale) -> None:
    heat = panel.heat
    assert heat is not None
    rows = [_floats(row) for row in heat.values]
    span = heat.span or max((abs(v) for row in rows for v in row if v == v), default=0.0) or 1.0
    low = -span if heat.is_gain else 0.0
    scale = _scale(changes if heat.is_gain else SHARE)
    columns = list(heat.x) or list(range(len(panel.x.labels)))
    half = (columns[1] - columns[0]) / 2 if len(columns) > 1 else 0.5
    bottom, top = (heat.y[0], heat.y[-1]) if heat.y else (-0.5, len(rows) - 0.5)
    extent = (columns[0] - half, columns[-1] + half, bottom, top)
    image = axis.imshow(
        rows, cmap=scale, vmin=low, vmax=span, aspect="auto", extent=extent, origin="lower", interpolation="nearest"
    )
    canvas.colorbar(image, ax=axis, shrink=0.85, format=_SIGNED if heat.is_gain else None)
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

    getattr(axis, f"set_{way}label")(_wrapped(about.title, _TITLE if way == "x" else _NAMES))
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
            positions, [_wrapped(about.labels[position], _NAMES) for position in positions], **turned
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


def _scale(stops: Scale) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("forkmerge", list(stops))


def _sign(value: float | None) -> tuple[str, str]:
    if not value:
        return _MUTED, LEVEL_MARKER
    return (GAIN, GAIN_MARKER) if value > 0 else (LOSS, LOSS_MARKER)


def _gap(x: list[float]) -> float:
    return min((b - a for a, b in pairwise(x) if b > a), default=1.0)


def _floats(values: tuple[float | None, ...]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]
