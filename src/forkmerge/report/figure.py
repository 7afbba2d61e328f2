"""A figure as plain data: what is drawn, apart from how; the page and the printed figure are made from the same one."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from forkmerge.algorithms.table_data import for_spreadsheet, show_in_full

Numbers = tuple[float | None, ...]
"""None leaves a gap."""
MOST_LINES = 8  # lines that can be told apart; more become rows of a heat map
_MOST_LARGE = 30  # dots of full size


@dataclass(frozen=True)
class Axis:
    """One direction of a panel.

    Args:
        title: What it measures.
        low: Where it begins; None for wherever the data does.
        high: Where it ends.
        labels: Names that stand at 0, 1, 2, …, for an axis of names.
        ticks: Where marks stand; empty for wherever they look best.
        is_log: Whether it is logarithmic.
        is_percent: Whether fractions are shown in per cent.
        is_hidden: Whether nothing of it is drawn.
    """

    title: str = ""
    low: float | None = None
    high: float | None = None
    labels: tuple[str, ...] = ()
    ticks: tuple[float, ...] = ()
    is_log: bool = False
    is_percent: bool = False
    is_hidden: bool = False


@dataclass(frozen=True)
class Series:
    """Points that belong together.

    Args:
        name: Their name in the legend; one colour per name in all panels of a figure.
        x: Where they are.
        y: Where they are.
        low: Lower ends of intervals along the axis of numbers.
        high: Upper ends.
        kind: "line", "steps", "dots" or "bars".
        values: Gains that colour the points: one colour below zero, another above.
        texts: What hovering over a point says besides its numbers.
        labels: What is written beside a point.
        is_below: Whether that stands below the point instead of above.
        is_shown: Whether it is drawn before somebody clicks on its name.
        is_reference: Whether it is only there to compare with: thin, grey and dashed.
    """

    name: str
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()
    kind: str = "line"
    values: Numbers = ()
    texts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    is_below: bool = False
    is_shown: bool = True
    is_reference: bool = False


@dataclass(frozen=True)
class Heat:
    """A matrix of numbers as colours.

    Args:
        values: By row and column.
        x: Where the columns are, unless the axis names them.
        y: Where the rows are, unless the axis names them.
        is_gain: Whether zero divides losses from gains; otherwise numbers go from light to dark.
        is_written: Whether every cell shows its number.
        span: Size of a number that gets the deepest colour, for panels that share a scale; None: the largest.
    """

    values: tuple[Numbers, ...]
    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()
    is_gain: bool = False
    is_written: bool = False
    span: float | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes; names on the y axis make bars and intervals horizontal.

    Args:
        title: What tells it from the other panels.
        x: The horizontal axis.
        y: The vertical axis.
        series: What is drawn in it.
        heat: A matrix, with the axes' labels as names of its columns and rows.
        is_square: Whether both axes have one scale.
    """

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    heat: Heat | None = None
    is_square: bool = False

    @property
    def is_sideways(self) -> bool:
        """Whether values run horizontally."""
        return bool(self.y.labels)

    def is_crowded(self, series: Series) -> bool:
        """Whether dots of a series are drawn small: they stand beside the line of their means, or among many others."""
        if series.kind != "dots" or len(series.x) == 1:
            return False
        most = max(len(other.x) for other in self.series if other.kind == "dots")
        return most > _MOST_LARGE or any(other.kind == "line" and other.name == series.name for other in self.series)


@dataclass(frozen=True)
class Figure:
    """A named figure.

    Args:
        name: What to type for it, a word of a command.
        title: What it shows.
        caption: How to read it.
        panels: Its panels, side by side.
        before: Names that get their colours first, as in the figure before this one.
        across: Panels of a row on paper.
        has_paper_colours: Whether gains are red and losses blue, as in the paper's figure that this one reproduces;
            otherwise losses are red.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    before: tuple[str, ...] = ()
    across: int = 3
    has_paper_colours: bool = False

    @property
    def names(self) -> list[str]:
        """Names of all series but those that only help to compare, in order of appearance."""
        names = (series.name for panel in self.panels for series in panel.series if not series.is_reference)
        return list(dict.fromkeys(name for name in names if name))

    @property
    def styles(self) -> dict[str, int]:
        """Which style each name has."""
        return {name: index for index, name in enumerate(dict.fromkeys((*self.before, *self.names)))}


def figure_csv(figure: Figure) -> str:
    """Return the numbers of a figure in full precision, a line per point."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["panel", "series", "x", "y", "low", "high", "value", "text"])
    for panel in figure.panels:
        if panel.heat is not None:
            for row, values in enumerate(panel.heat.values):
                for column, value in enumerate(values):
                    x = show_in_full(panel.heat.x[column]) if panel.heat.x else _coordinate(panel.x, column)
                    y = show_in_full(panel.heat.y[row]) if panel.heat.y else _coordinate(panel.y, row)
                    writer.writerow([for_spreadsheet(panel.title), "", x, y, "", "", show_in_full(value), ""])
        for series in panel.series:
            for i, point in enumerate(zip(series.x, series.y, strict=True)):
                at = [_coordinate(axis, value) for axis, value in zip((panel.x, panel.y), point, strict=True)]
                rest = [show_in_full(_at(column, i)) for column in (series.low, series.high, series.values)]
                names = for_spreadsheet(panel.title), for_spreadsheet(series.name)
                writer.writerow([*names, *at, *rest, for_spreadsheet(series.texts[i]) if series.texts else ""])
    return file.getvalue()


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if values else None


def _coordinate(axis: Axis, value: float | None) -> str:
    """Return a coordinate, by its name on an axis of names."""
    if value is not None and axis.labels and value == int(value) and 0 <= value < len(axis.labels):
        return for_spreadsheet(axis.labels[int(value)])
    return show_in_full(value)
