"""One self-contained HTML page: everything in it is escaped, and it asks nothing of any network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from string import Template
from typing import Any

from forkmerge._version import __version__
from forkmerge.algorithms.table_data import Cell, Column, Table
from forkmerge.errors import ConfigError
from forkmerge.report.colours import (
    DASHES,
    GAIN,
    MIDDLE_ON_DARK,
    NEGATIVE,
    NEGATIVE_ON_DARK,
    ON_DARK,
    POSITIVE,
    POSITIVE_ON_DARK,
    SHARE,
    STYLES,
)
from forkmerge.report.figure import Figure, figure_csv
from forkmerge.report.plotly_figure import to_plotly
from forkmerge.report.table import to_csv

_LONGEST_LINE = 40  # characters of a cell that stay on one line
_SCALES = {
    "light": {"gain": GAIN, "share": SHARE},
    "dark": {
        "gain": ((0.0, NEGATIVE_ON_DARK), (0.5, MIDDLE_ON_DARK), (1.0, POSITIVE_ON_DARK)),
        "share": ((0.0, "#1B2028"), (1.0, "#7CC4F5")),
    },
}


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Args:
        title: Its heading.
        text: A sentence or two below it.
        items: Its tables and figures, in order.
    """

    title: str
    text: str
    items: tuple[Table | Figure, ...]


@dataclass(frozen=True)
class Page:
    """What a report says.

    Args:
        title: Of the browser's tab.
        kind: What it reports on, e.g. "run".
        headline: The result in one plain sentence.
        facts: Short facts below it.
        sections: The parts.
        notes: What a reader should know.
        configuration: What was run, as plain data.
        environment: Where it ran.
        commands: `{what it does: what to type}`.
    """

    title: str
    kind: str
    headline: str
    facts: Mapping[str, str]
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()
    configuration: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    commands: Mapping[str, str] | None = None

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures by name."""
        items = (item for section in self.sections for item in section.items)
        return {item.name: item for item in items if isinstance(item, Figure)}


def to_html(page: Page) -> str:
    """Return the page as one HTML file."""
    plotly, script = _plotly(), _asset("page.js")
    drawn = {name: to_plotly(figure) for name, figure in page.figures.items()}
    return Template(_asset("page.html")).substitute(
        title=_text(page.title),
        kind=_text(page.kind),
        headline=_text(page.headline),
        facts="".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in page.facts.items()),
        contents="".join(f'<a href="#s{i}">{_text(s.title)}</a>' for i, s in enumerate(page.sections)),
        sections="".join(_section(i, section) for i, section in enumerate(page.sections)),
        notes=_list("Notes", page.notes),
        commands=_commands(page.commands or {}),
        configuration=_details("Configuration", page.configuration),
        environment=_details("Environment", page.environment),
        version=_text(__version__),
        style=_palette() + _asset("page.css"),
        # With the scripts' own checksums, a browser runs nothing else, whatever a name may hold.
        scripts=" ".join(f"'sha256-{_checksum(text)}'" for text in (plotly, script)),
        data=_embedded({"figures": drawn, "scales": _SCALES}),
        plotly=plotly,
        script=script,
    )


def _asset(name: str) -> str:
    return resources.files("forkmerge.report").joinpath(name).read_text("utf-8")


def _plotly() -> str:
    if find_spec("plotly") is None:
        raise ConfigError("the figures of a page are drawn by plotly: pip install 'forkmerge[report]'.")
    return resources.files("plotly").joinpath("package_data/plotly.min.js").read_text("utf-8")


def _checksum(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(data: Any) -> str:
    """Return JSON that cannot end the element it stands in."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _text(value: object) -> str:
    return html.escape(str(value))


def _palette() -> str:
    """Return the colours of both themes as CSS variables."""
    light = {**{f"c{i}": colour for i, (colour, _) in enumerate(STYLES)}, "negative": NEGATIVE, "positive": POSITIVE}
    dark = {f"c{i}": colour for i, colour in enumerate(ON_DARK)}
    dark.update(negative=NEGATIVE_ON_DARK, positive=POSITIVE_ON_DARK)
    rules = {":root": light, ':root[data-theme="dark"]': dark}
    return "".join(
        f"{where} {{{''.join(f'--{k}:{v};' for k, v in colours.items())}}}\n" for where, colours in rules.items()
    )


def _section(index: int, section: Section) -> str:
    items = "".join(_figure(item) if isinstance(item, Figure) else _table(item) for item in section.items)
    text = f"<p>{_text(section.text)}</p>" if section.text else ""
    return f'<section id="s{index}"><h2>{_text(section.title)}</h2>{text}{items}</section>'


def _figure(figure: Figure) -> str:
    panels = "".join(
        (f'<div class="panel"><h4>{_text(panel.title)}</h4>' if panel.title else '<div class="panel">')
        + f'<div class="plot" data-figure="{_text(figure.name)}" data-panel="{index}"></div></div>'
        for index, panel in enumerate(figure.panels)
    )
    alone = " alone" if len(figure.panels) == 1 else ""
    return (
        f'<figure id="figure-{_text(figure.name)}"><header><h3>{_text(figure.title)}</h3>'
        f"{_download(figure.name, figure_csv(figure))}</header>{_legend(figure)}"
        f'<div class="panels{alone}">{panels}</div><figcaption>{_text(figure.caption)}</figcaption></figure>'
    )


def _legend(figure: Figure) -> str:
    names = figure.names
    if len(names) < 2:
        return ""
    hidden = {series.name for panel in figure.panels for series in panel.series if not series.is_shown}
    buttons = "".join(
        f'<button type="button" data-series="{_text(name)}" aria-pressed="{str(name not in hidden).lower()}">'
        f'<i class="c{index % len(STYLES)} {DASHES[index // len(STYLES) % len(DASHES)]}"></i>{_text(name)}</button>'
        for name, index in figure.styles.items()
        if name in names
    )
    return f'<div class="legend">{buttons}</div>'


def _download(name: str, text: str) -> str:
    data = base64.b64encode(text.encode()).decode()
    return f'<a class="csv" download="{_text(name)}.csv" href="data:text/csv;charset=utf-8;base64,{data}">CSV</a>'


def _table(table: Table) -> str:
    head = "".join(
        f'<th{"" if column.is_words else " class=number"}><button type="button">{_text(column.title)}</button></th>'
        for column in table.columns
    )
    rows = "".join(
        "<tr>" + "".join(_cell(*parts) for parts in zip(table.columns, row, texts, strict=True)) + "</tr>"
        for row, texts in zip(table.rows, table.texts(), strict=True)
    )
    notes = "".join(f"<li>{_text(note)}</li>" for note in table.notes)
    return (
        f'<div class="table"><header><h3>{_text(table.title)}</h3>{_download("table", to_csv([table]))}</header>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"{f'<ul class=notes>{notes}</ul>' if notes else ''}</div>"
    )


def _cell(column: Column, cell: Cell, text: str) -> str:
    classes = [] if column.is_words else ["number"]
    if cell.is_best:
        classes.append("best")
    if len(text) > _LONGEST_LINE:
        classes.append("long")
    if column.signed and not column.is_neutral:
        classes += _sign(cell, text)
    shown = _text(text)
    if column.is_verdict and cell.text in _PILLS:
        sign, kind = _PILLS[cell.text]
        shown = f'<span class="pill {kind}">{sign} {shown}</span>'
    ends = [end for end in (cell.low, cell.high) if end is not None]
    value = cell.value if cell.value is not None else sum(ends) / 2 if len(ends) == 2 else None
    number = "" if value is None else f' data-value="{value!r}"'
    return f'<td class="{" ".join(classes)}"{number}>{shown}</td>'


def _sign(cell: Cell, text: str) -> list[str]:
    """Colour a number that has a sign, but not one whose interval holds zero."""
    if cell.low is not None and cell.high is not None:
        return ["positive"] if cell.low > 0 else ["negative"] if cell.high < 0 else []
    return {"+": ["positive"], "−": ["negative"]}.get(text[:1], [])


_PILLS = {
    "better": ("▲", "positive"),
    "worse": ("▼", "negative"),
    "no evidence": ("◦", ""),
    "used": ("▲", "positive"),
    "hardly used": ("◦", ""),
    "refused": ("▼", "negative"),
    "positive": ("▲", "positive"),
    "weak negative": ("▽", "negative"),
    "strong negative": ("▼", "negative"),
    "not enough evidence": ("◦", ""),
    "use": ("▲", "positive"),
    "down-weight": ("▽", "negative"),
    "drop": ("▼", "negative"),
    "try": ("△", "positive"),
    "no difference shown": ("◦", ""),
}
"""Verdicts, each with a sign beside its colour."""


def _list(title: str, items: Sequence[str]) -> str:
    lines = "".join(f"<li>{_text(item)}</li>" for item in items)
    return f"<section><h2>{_text(title)}</h2><ul>{lines}</ul></section>" if items else ""


def _commands(commands: Mapping[str, str]) -> str:
    lines = "".join(f"<dt>{_text(what)}</dt><dd><code>{_text(words)}</code></dd>" for what, words in commands.items())
    return f'<dl class="commands">{lines}</dl>' if lines else ""


def _details(title: str, data: Mapping[str, Any] | None) -> str:
    if not data:
        return ""
    text = json.dumps(data, indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>{_text(title)}</summary><pre>{_text(text)}</pre></details>"
