"""From a figure to what plotly draws: plain dictionaries, with the names of colours that the page fills in.

A colour is "$" and a word: its value depends on whether the page is light or dark. Plotly reads text as a little HTML,
so every name is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from forkmerge.report.colours import DASHES, GAIN_MARKER, LEVEL_MARKER, LOSS_MARKER, STYLES
from forkmerge.report.figure import Axis, Figure, Panel, Series
from forkmerge.report.label_lines import columns, label_lines

_SYMBOLS = {"o": "circle", "D": "diamond", "s": "square", "X": "x", "^": "triangle-up", "v": "triangle-down"}
_DIGITS = 6  # significant ones in the page; the CSV has them all
_MOST_MARKERS = 60  # points of a line that are marked
_MOST_UNIFIED = 8  # lines that one hover box can list
_MOST_NAMES = 60  # names on an axis before they would overlap
_ROW, _LINE, _HEIGHT, _SQUARE, _AROUND, _TRIANGLE = 28, 17, 340, 460, 100, 245  # pixels
_COLUMN, _LETTER, _BAR = 34, 7.5, 90  # pixels: a column with a number in it, a letter, a bar of colours and margins


@dataclass(frozen=True)
class _Room:
    """How many letters a line may have: of names on an axis, and of the titles of both axes."""

    names: int
    title: int
    upright: int = 34  # as high as the lowest figures


_WIDE, _NARROW = _Room(28, 46), _Room(18, 34)


def to_plotly(figure: Figure) -> list[dict[str, Any]]:
    """Return `{"data": …, "layout": …, "narrow": …, "least": …}` for every panel.

    The second layout is for the screen of a phone; `least` are the pixels below which a panel scrolls.
    """
    styles = figure.styles
    scale = "$paper-scale" if figure.has_paper_colours else "$changes"
    return [
        {
            "data": _traces(panel, styles, scale),
            "layout": _layout(panel, _WIDE),
            "narrow": _layout(panel, _NARROW),
            "least": _least_width(panel),
        }
        for panel in figure.panels
    ]


def _traces(panel: Panel, styles: dict[str, int], scale: str) -> list[dict[str, Any]]:
    traces = [_heat(panel, scale)] if panel.heat is not None else []
    for series in panel.series:
        if series.kind == "line" and series.low and not panel.is_sideways:
            traces.append(_band(series, _colour(series, styles)))
        traces.append(_points(panel, series, styles, scale))
    return traces


def _colour(series: Series, styles: dict[str, int]) -> str:
    return "$muted" if series.is_reference else f"$c{styles.get(series.name, 0) % len(STYLES)}"


def _points(panel: Panel, series: Series, styles: dict[str, int], scale: str) -> dict[str, Any]:
    index = 0 if series.is_reference else styles.get(series.name, 0)
    colour = _colour(series, styles)
    trace: dict[str, Any] = {
        "type": "bar" if series.kind == "bars" else "scatter",
        "name": _wrapped(series.name, _WIDE.names),
        "x": _numbers(series.x),
        "y": _numbers(series.y),
        "meta": series.name,
        "showlegend": False,
        "visible": series.is_shown,
        **_hover(panel, series),
    }
    marker: dict[str, Any] = {"color": colour}
    if series.values:
        marker = _gain_marker(panel, series, scale)
    if series.kind == "bars":
        return {**trace, "orientation": "h" if panel.is_sideways else "v", "marker": marker, "textposition": "none"}
    few = len(series.x) <= _MOST_MARKERS and not series.is_reference
    marked = series.kind == "dots" or (series.kind == "line" and few)
    mode = "markers" if series.kind == "dots" else "lines+markers" if marked else "lines"
    trace["mode"] = mode + ("+text" if series.labels else "")
    many = panel.is_crowded(series) and not series.values
    if many:
        trace["opacity"] = 0.65
    trace["marker"] = {"size": 6 if many else 9, "symbol": _SYMBOLS[STYLES[index % len(STYLES)][1]], **marker}
    if panel.heat is not None:
        trace["marker"]["line"] = {"color": "$card", "width": 1.5}
    if series.kind != "dots":
        dash = "dash" if series.is_reference else DASHES[index // len(STYLES) % len(DASHES)]
        shape = "hv" if series.kind == "steps" else "linear"
        trace["line"] = {"color": colour, "width": 1.5 if series.is_reference else 2.2, "dash": dash, "shape": shape}
    if series.kind == "steps":
        trace.update(fill="tozeroy", fillcolor=f"{colour}~")
    if series.labels:
        trace.update(text=[_wrapped(label, _NARROW.names) for label in series.labels], cliponaxis=False)
        where = "bottom center" if series.is_below else "top center"
        trace.update(textposition=where, textfont={"color": "$ink", "size": 12})
    if series.kind == "dots" and series.low:
        trace["error_x" if panel.is_sideways else "error_y"] = _interval(panel, series)
    return trace


def _gain_marker(panel: Panel, series: Series, scale: str) -> dict[str, Any]:
    """Return markers of gains and losses: by sign beside names, by size elsewhere."""
    if panel.is_sideways:
        signs = [_sign(value) for value in series.values]
        return {"color": [colour for colour, _ in signs], "symbol": [_SYMBOLS[marker] for _, marker in signs]}
    span = max((abs(value) for value in series.values if value is not None), default=0.0) or 1.0
    size = _TRIANGLE / max(math.sqrt(2 * len(series.values)) - 1, 1)  # pixels between two of them in a triangle
    cells = {
        "symbol": "hexagon",
        "size": 1.12 * size,
        "colorscale": scale,
        "cmin": -span,
        "cmax": span,
        "showscale": True,
        "line": {"width": 0},
    }
    return {"color": _numbers(series.values), **cells, "colorbar": _colour_bar(panel, is_gain=True)}


def _sign(value: float | None) -> tuple[str, str]:
    if not value:
        return "$muted", LEVEL_MARKER
    return ("$gain", GAIN_MARKER) if value > 0 else ("$loss", LOSS_MARKER)


def _interval(panel: Panel, series: Series) -> dict[str, Any]:
    middle = series.x if panel.is_sideways else series.y
    ends = list(zip(middle, series.low, series.high, strict=True))
    above = [None if m is None or high is None else high - m for m, _, high in ends]
    below = [None if m is None or low is None else m - low for m, low, _ in ends]
    return {"array": _numbers(above), "arrayminus": _numbers(below), "color": "$muted", "thickness": 1.6, "width": 4}


def _band(series: Series, colour: str) -> dict[str, Any]:
    points = [
        (x, low, high)
        for x, low, high in zip(series.x, series.low, series.high, strict=True)
        if None not in (x, low, high)
    ]
    x = [point[0] for point in points]
    edge = [point[2] for point in points] + [point[1] for point in reversed(points)]
    return {
        "type": "scatter",
        "x": _numbers([*x, *reversed(x)]),
        "y": _numbers(edge),
        "fill": "toself",
        "fillcolor": f"{colour}~",
        "line": {"width": 0, "color": colour},
        "mode": "lines",
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": series.name,
        "visible": series.is_shown,
    }


def _hover(panel: Panel, series: Series) -> dict[str, Any]:
    value, axis = ("x", panel.x) if panel.is_sideways else ("y", panel.y)
    other = "y" if panel.is_sideways else "x"
    names = panel.y.labels if panel.is_sideways else panel.x.labels
    lines = [f"%{{{value}:{_format(axis)}}}"]
    hover: dict[str, Any] = {}
    if series.low:
        lines[0] += "%{customdata}"
        hover["customdata"] = [_between(axis, *ends) for ends in zip(series.low, series.high, strict=True)]
    texts = series.texts or tuple(_name_at(names, p) for p in (series.y if panel.is_sideways else series.x))
    if any(texts):
        hover["hovertext"] = _texts(texts)
        lines.append("%{hovertext}")
    elif series.kind == "dots":
        lines.insert(0, f"%{{{other}:{_format(panel.x)}}}")
    return {**hover, "hovertemplate": "<br>".join(lines) + "<extra>%{fullData.name}</extra>"}


def _between(axis: Axis, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    form = "{:+.2%}" if axis.is_percent else "{:.4g}"
    return f" [{form.format(low)}, {form.format(high)}]".replace("-", "−")


def _name_at(names: Sequence[str], position: float | None) -> str:
    return names[int(position)] if names and position is not None and 0 <= position < len(names) else ""


def _heat(panel: Panel, scale: str) -> dict[str, Any]:
    heat = panel.heat
    assert heat is not None
    sizes = [abs(value) for row in heat.values for value in row if value is not None]
    span = heat.span or max(sizes, default=0.0) or 1.0
    form = _format(panel.y if panel.y.is_percent else Axis())
    form = f"+{form}" if heat.is_gain and not form.startswith("+") else form
    return {
        "type": "heatmap",
        "z": [_numbers(row) for row in heat.values],
        "x": list(heat.x) or _texts(panel.x.labels),
        "y": list(heat.y) or _texts(panel.y.labels),
        "zmin": -span if heat.is_gain else min(0.0, *sizes) if not heat.y else min(sizes),
        "zmax": span,
        "colorscale": scale if heat.is_gain else "$share",
        "xgap": 1 if heat.is_written else 0,
        "ygap": 1,
        "hovertemplate": f"%{{y}}<br>%{{x}}<br><b>%{{z:{form}}}</b><extra></extra>",
        "colorbar": _colour_bar(panel, heat.is_gain),
        **({"text": _written(panel), "texttemplate": "%{text}"} if heat.is_written else {}),
    }


def _written(panel: Panel) -> list[list[str]]:
    assert panel.heat is not None
    form = "{:+.1%}" if panel.y.is_percent else "{:+.2g}" if panel.heat.is_gain else "{:.2g}"
    rows = panel.heat.values
    return [["" if v is None else form.format(v).replace("-", "−") for v in row] for row in rows]


def _colour_bar(panel: Panel, is_gain: bool) -> dict[str, Any]:
    form = _format(panel.y) if panel.y.is_percent else "+.4~g" if is_gain else ".4~g"
    return {"thickness": 10, "outlinewidth": 0, "tickfont": {"color": "$muted"}, "tickformat": form, "len": 0.9}


def _least_width(panel: Panel) -> int:
    """Return the pixels that the numbers of a heat map need."""
    if panel.heat is None or not panel.heat.is_written:
        return 0
    return round(_COLUMN * len(panel.x.labels) + _LETTER * _longest(panel.y, _NARROW) + _BAR)


def _longest(axis: Axis, room: _Room) -> int:
    """Return the letters of the longest line of an axis's names."""
    return max((columns(line) for label in axis.labels for line in label_lines(label, room.names)), default=0)


def _title_room(panel: Panel, room: _Room) -> int:
    """Return how long the title below may be: it stands in the middle of what names on the left leave."""
    return max(room.title - _longest(panel.y, room), 17)


def _height(panel: Panel, room: _Room) -> int:
    if not panel.y.labels:
        return _SQUARE if panel.is_square else _HEIGHT
    lines = max(len(label_lines(label, room.names)) for label in panel.y.labels)
    rows = min(len(panel.y.labels), _MOST_NAMES) * max(_ROW, _LINE * lines + 8)
    turned = round(_LETTER * _longest(panel.x, room)) if panel.x.labels else 0  # names below stand upright at worst
    titles = _LINE * (len(label_lines(panel.x.title, _title_room(panel, room))) - 1)
    return max(rows + _AROUND + turned + titles, 200)


def _layout(panel: Panel, room: _Room) -> dict[str, Any]:
    lines = [series for series in panel.series if series.kind in ("line", "steps")]
    unified = lines and len(lines) == len(panel.series) and len(lines) <= _MOST_UNIFIED and not panel.is_sideways
    layout: dict[str, Any] = {
        "height": _height(panel, room),
        "xaxis": _axis(panel.x, panel, room, _title_room(panel, room)),
        "yaxis": {**_axis(panel.y, panel, room, room.upright), **({"autorange": "reversed"} if panel.y.labels else {})},
        "hovermode": "x unified" if unified else "closest",
    }
    if panel.is_square:
        layout["yaxis"].update(scaleanchor="x", scaleratio=1, constrain="domain")
        layout["xaxis"].update(constrain="domain")
    return layout


def _axis(axis: Axis, panel: Panel, room: _Room, longest: int) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "title": {"text": _wrapped(axis.title, longest), "standoff": 12, "font": {"size": 14}},
        "automargin": True,
        "gridcolor": "$grid",
        "linecolor": "$grid",
        "zeroline": not axis.labels and panel.heat is None,
        "zerolinecolor": "$muted",
        "tickfont": {"color": "$muted"},
        "visible": not axis.is_hidden,
        "showgrid": not axis.labels and panel.heat is None,
    }
    if axis.is_log:
        layout["type"] = "log"
    elif axis.labels:
        every = -(-len(axis.labels) // _MOST_NAMES)
        positions = range(0, len(axis.labels), every)
        shown = [_wrapped(axis.labels[position], room.names) for position in positions]
        # A category by its name: plotly would take the place 1 for a category that is called "1".
        marks = _texts(axis.labels[position] for position in positions) if panel.heat else list(positions)
        layout.update(tickvals=marks, ticktext=shown, type="category" if panel.heat else "linear")
        if panel.heat is None:
            layout["range"] = [-0.6, len(axis.labels) - 0.4]
    if axis.ticks:
        layout["tickvals"] = list(axis.ticks)
    if axis.is_percent and not axis.labels:
        layout["tickformat"] = "+.3~p" if axis.low is None else ".3~p"
    if axis.low is not None and axis.high is not None:
        layout["range"] = [axis.low, axis.high]
    return layout


def _format(axis: Axis) -> str:
    return "+.2%" if axis.is_percent else ".4~g"


def _numbers(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in values]


def _texts(values: Iterable[str]) -> list[str]:
    return [_safe(value) for value in values]


def _wrapped(text: str, longest: int) -> str:
    return "<br>".join(_texts(label_lines(text, longest)))


def _safe(text: str) -> str:
    """Escape what plotly would read as HTML, or as a formula between dollar signs."""
    return html.escape(text, quote=False).replace("$", "&#36;")
