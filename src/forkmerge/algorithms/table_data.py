"""Numbers as text, and tables as plain data: the terminal, pages, cards and notebooks show the same ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forkmerge.errors import printable

_ARROWS = {1: " ↑", -1: " ↓", 0: ""}
# Emphasis, code, bars of tables, links, HTML; and what would begin a list, a quotation or a heading.
_MARKUP = re.compile(r"[\\`*~|]|\](?=[(\[:])|<(?=[A-Za-z/!?])|(?<![^\W_])_|_(?![^\W_])")
_BLOCK = re.compile(r"^(\d*)([#>+.)-])(?=\s)")
_NUMBER = re.compile(r"[+-]?[\d.]+([eE][+-]?\d+)?")
_SIGNIFICANT = 4  # digits of a number alone, and of the largest number of a column


def show_number(value: float | None) -> str:
    """Return a number that stands alone, not in a column; "–" where there is none."""
    return "–" if value is None else f"{value:.{_SIGNIFICANT}g}"


def show_in_full(value: float | None) -> str:
    """Return a number that a program reads back to the same bits; nothing where there is none."""
    return "" if value is None else repr(value)


def show_metrics(metrics: Mapping[str, float | None]) -> str:
    """Return metrics as one readable line."""
    return ", ".join(f"{name} {show_number(value)}" for name, value in metrics.items())


def show_share(value: float) -> str:
    """Return a coefficient, or a relevance, outside of a column."""
    return f"{value:.2f}"


def show_steps(phase: str, steps: Mapping[str, int]) -> str:
    """Return where a checkpoint stands; an interrupted round may have branches at different steps.

    Example:
        >>> show_steps("refit", {"alone": 8, "joint": 8}), show_steps("search", {"alone": 8, "joint": 5})
        ('refit step 8', "step 8 of 'alone', 5 of 'joint'")
    """
    values = list(dict.fromkeys(steps.values()))
    each = ", ".join(f"{step} of {name!r}" for name, step in steps.items())
    return f"{'refit ' if phase == 'refit' else ''}step {values[0] if len(values) == 1 else each}"


def show_shares(shares: Mapping[str, float]) -> str:
    """Return coefficients, or relevances, as one readable line."""
    return ", ".join(f"{name} {show_share(value)}" for name, value in shares.items())


def show_seconds(seconds: float) -> str:
    """Return a duration such as "40 s", "3 min" or "2.5 h"."""
    if seconds < 0.095:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 99.5:
        return f"{seconds:.2g} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def show_bytes(count: float) -> str:
    """Return a size such as "1.4 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def for_markdown(text: str) -> str:
    """Return text as one line that Markdown shows as it is."""
    line = re.sub(r"\s*\n\s*", " ", printable(text))
    return _BLOCK.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", line))


def for_spreadsheet(text: str) -> str:
    """Return text that no spreadsheet takes for a formula; numbers stay numbers."""
    is_formula = text.startswith(tuple("=+-@\t\r\n")) and not _NUMBER.fullmatch(text)
    return "'" * is_formula + printable(text)


@dataclass(frozen=True)
class Cell:
    """A number and what belongs to it, or words.

    Args:
        value: The number.
        std: Its standard deviation.
        low: Lower end of an interval.
        high: Upper end.
        text: Words instead of a number.
        is_best: Whether it is the best of its column.
    """

    value: float | None = None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    text: str = ""
    is_best: bool = False


@dataclass(frozen=True)
class Column:
    """How the cells of a column are shown.

    Args:
        name: Its title.
        direction: +1 or −1 for metrics, shown as an arrow.
        scale: What numbers are multiplied with, such as 100 for per cent.
        decimals: Digits behind the point; None for as many as the largest number needs.
        signed: Whether positive numbers have a sign.
        is_neutral: Whether that sign is neither good nor bad, so that a page gives it no colour.
        is_words: Whether its cells are words, which stand on the left.
        is_verdict: Whether these words are verdicts, which a page gives a sign and a colour.
    """

    name: str
    direction: int = 0
    scale: float = 1.0
    decimals: int | None = None
    signed: bool = False
    is_words: bool = False
    is_neutral: bool = False
    is_verdict: bool = False

    @property
    def title(self) -> str:
        """The name with its arrow."""
        return self.name + _ARROWS[self.direction]


@dataclass(frozen=True)
class Table:
    """A table: the first column names the rows.

    Args:
        title: What it shows.
        columns: Its columns.
        rows: Its rows, one cell per column.
        notes: What a reader should know.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def texts(self) -> list[list[str]]:
        """Return every cell as it is shown."""
        decimals = [_decimals(column, [row[i] for row in self.rows]) for i, column in enumerate(self.columns)]
        return [[_text(cell, self.columns[i], decimals[i]) for i, cell in enumerate(row)] for row in self.rows]

    def markdown(self) -> str:
        """Return the lines of a Markdown table, without title and notes."""
        lines = [_pipes(for_markdown(column.title) for column in self.columns)]
        lines.append(_pipes("---" if column.is_words else "---:" for column in self.columns))
        for row, texts in zip(self.rows, self.texts(), strict=True):
            pairs = [(cell, for_markdown(text) if cell.text else text) for cell, text in zip(row, texts, strict=True)]
            lines.append(_pipes(f"**{text}**" if cell.is_best and text else text for cell, text in pairs))
        return "\n".join(lines)


def word_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> Table:
    """Return a table of words alone."""
    columns = tuple(Column(name, is_words=True) for name in head)
    return Table(title, columns, tuple(tuple(Cell(text=text) for text in row) for row in rows), tuple(notes))


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _decimals(column: Column, cells: Sequence[Cell]) -> int:
    if column.decimals is not None:
        return column.decimals
    values = [abs(cell.value * column.scale) for cell in cells if cell.value is not None and math.isfinite(cell.value)]
    largest = max(values, default=0.0)
    return min(max(_SIGNIFICANT - 1 - math.floor(math.log10(largest)), 0), 8) if largest else 2


def _text(cell: Cell, column: Column, decimals: int) -> str:
    if cell.text:
        return cell.text

    def show(value: float, signed: bool) -> str:
        number = round(value * column.scale, decimals) or 0.0  # zero has no sign
        return f"{number:{'+' if signed and number else ''}.{decimals}f}".replace("-", "−")

    parts = []
    if cell.value is not None:
        parts.append(show(cell.value, column.signed))
    if cell.std is not None:
        parts.append(f"± {show(cell.std, False)}")
    if cell.low is not None and cell.high is not None:
        parts.append(f"[{show(cell.low, column.signed)}, {show(cell.high, column.signed)}]")
    return " ".join(parts)
