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
    CHANGES,
    CHANGES_ON_DARK,
    GAIN,
    GAIN_ON_DARK,
    GLYPHS,
    LOSS,
    LOSS_ON_DARK,
    ON_DARK,
    PAPER,
    PAPER_ON_DARK,
    SHARE,
    SHARE_ON_DARK,
    STYLES,
    style,
)
from forkmerge.report.figure import Figure, figure_csv
from forkmerge.report.plotly_figure import to_plotly
from forkmerge.report.symbols import SYMBOLS, explained_in, symbols_in
from forkmerge.report.table import to_csv

_LONGEST_LINE = 40  # characters of a cell that stay on one line
_SCALES = {
    "light": {"changes": CHANGES, "paper-scale": PAPER, "share": SHARE},
    "dark": {"changes": CHANGES_ON_DARK, "paper-scale": PAPER_ON_DARK, "share": SHARE_ON_DARK},
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
        sections=_sections(page.sections),
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
    light = {**{f"c{i}": colour for i, (colour, _) in enumerate(STYLES)}, "gain": GAIN, "loss": LOSS}
    dark = {f"c{i}": colour for i, colour in enumerate(ON_DARK)}
    dark.update(gain=GAIN_ON_DARK, loss=LOSS_ON_DARK)
    rules = {":root": light, ':root[data-theme="dark"]': dark}
    return "".join(
        f"{where} {{{''.join(f'--{k}:{v};' for k, v in colours.items())}}}\n" for where, colours in rules.items()
    )


def _sections(sections: Sequence[Section]) -> str:
    parts, seen = [], set[str]()
    for index, section in enumerate(sections):
        text = f"<p>{_text(section.text)}</p>" if section.text else ""
        parts.append(f'<section id="s{index}"><h2>{_text(section.title)}</h2>{text}')
        for item in section.items:
            symbols = [symbol for symbol in symbols_in([section.text, *_words(item)]) if symbol not in seen]
            seen.update(symbols)
            new = [f"{symbol}: {SYMBOLS[symbol]}." for symbol in symbols if symbol not in explained_in(_words(item))]
            parts.append(_figure(item, new) if isinstance(item, Figure) else _table(item, new))
        parts.append("</section>")
    return "".join(parts)


def _words(item: Table | Figure) -> list[str]:
    """Return what the library itself wrote into a table or figure, where symbols may stand."""
    if isinstance(item, Table):
        return [item.title, *(column.name for column in item.columns), *item.notes]
    axes = (axis.title for panel in item.panels for axis in (panel.x, panel.y))
    return [item.title, item.caption, *(panel.title for panel in item.panels), *axes]


def _figure(figure: Figure, symbols: Sequence[str] = ()) -> str:
    panels = "".join(
        (f'<div class="panel"><h4>{_text(panel.title)}</h4>' if panel.title else '<div class="panel">')
        + f'<div class="plot" data-figure="{_text(figure.name)}" data-panel="{index}"></div></div>'
        for index, panel in enumerate(figure.panels)
    )
    alone = " alone" if len(figure.panels) == 1 else ""
    lines = "".join(f"<div>{_text(line)}</div>" for line in symbols)
    return (
        f'<figure id="figure-{_text(figure.name)}"><header><h3>{_text(figure.title)}</h3>'
        f"{_download(figure.name, figure_csv(figure))}</header>{_legend(figure)}"
        f'<div class="panels{alone}">{panels}</div><figcaption>{_text(figure.caption)}{lines}</figcaption></figure>'
    )


def _legend(figure: Figure) -> str:
    names = figure.names
    if len(names) < 2:
        return ""
    hidden = {series.name for panel in figure.panels for series in panel.series if not series.is_shown}
    buttons = "".join(
        f'<button type="button" data-series="{_text(name)}" aria-pressed="{str(name not in hidden).lower()}">'
        f"{_swatch(index)}{_text(name)}</button>"
        for name, index in figure.styles.items()
        if name in names
    )
    return f'<div class="legend">{buttons}</div>'


def _swatch(index: int) -> str:
    _, marker, dash = style(index)
    return f'<i class="c{index % len(STYLES)} {dash}" data-marker="{GLYPHS[marker]}"></i>'


def _download(name: str, text: str) -> str:
    data = base64.b64encode(text.encode()).decode()
    return f'<a class="csv" download="{_text(name)}.csv" href="data:text/csv;charset=utf-8;base64,{data}">CSV</a>'


def _table(table: Table, symbols: Sequence[str] = ()) -> str:
    head = "".join(_head(column) for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(_cell(*parts) for parts in zip(table.columns, row, texts, strict=True)) + "</tr>"
        for row, texts in zip(table.rows, table.texts(), strict=True)
    )
    notes = "".join(f"<li>{_text(note)}</li>" for note in (*symbols, *table.notes))
    return (
        f'<div class="table"><header><h3>{_text(table.title)}</h3>{_download("table", to_csv([table]))}</header>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"{f'<ul class=notes>{notes}</ul>' if notes else ''}</div>"
    )


def _head(column: Column) -> str:
    meanings = "; ".join(f"{symbol}: {SYMBOLS[symbol]}" for symbol in symbols_in([column.name]))
    title = f' title="{_text(meanings)}"' if meanings else ""
    kind = "" if column.is_words else " class=number"
    # A long name may go on in the next line after "_", but no "w–t–l" is taken apart.
    shown = _text(column.title).replace("_", "_<wbr>").replace("–", "\u2060–\u2060")
    return f'<th{kind}><button type="button"{title}>{shown}</button></th>'


def _cell(column: Column, cell: Cell, text: str) -> str:
    classes = [] if column.is_words else ["number"]
    if cell.is_best:
        classes.append("best")
    if len(text) > _LONGEST_LINE:
        classes.append("long")
    if column.signed and not column.is_neutral:
        classes += _sign(cell, text)
    shown = _text(text)
    if cell.value is not None and cell.low is not None:  # the interval goes below the number where there is no room
        classes.append("split")
        shown = " ".join(f"<span>{part}</span>" for part in shown.partition(" [")[::2])
        shown = shown.replace("</span> <span>", "</span> <span>[", 1)
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
        return ["gain"] if cell.low > 0 else ["loss"] if cell.high < 0 else []
    return {"+": ["gain"], "−": ["loss"]}.get(text[:1], [])


_PILLS = {
    "better": ("▲", "gain"),
    "worse": ("▼", "loss"),
    "no evidence": ("◦", ""),
    "used": ("▲", "gain"),
    "hardly used": ("◦", ""),
    "refused": ("✕", ""),
    "positive": ("▲", "gain"),
    "weak negative": ("▽", "loss"),
    "strong negative": ("▼", "loss"),
    "not enough evidence": ("◦", ""),
    "use": ("▲", "gain"),
    "down-weight": ("▽", "loss"),
    "drop": ("▼", "loss"),
    "try": ("△", "gain"),
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
