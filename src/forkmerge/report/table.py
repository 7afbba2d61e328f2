"""One table, four forms: for the terminal, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table as RichTable

_ARROWS = {1: " ↑", -1: " ↓", 0: ""}
_SIGNIFICANT = 4  # digits of the largest number of a column
_LATEX = {
    "\\": r"\textbackslash{}",
    **{char: "\\" + char for char in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "Δ": r"$\Delta$",
    "λ": r"$\lambda$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "−": "$-$",
    "∪": r"$\cup$",
    "–": "--",
    "…": r"\dots{}",
    "<": "$<$",
    ">": "$>$",
}


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


def to_rich(table: Table) -> RichTable:
    """Return a table for the terminal."""
    shown = RichTable(title=escape(table.title), title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in table.columns:
        shown.add_column(escape(column.title), justify="left" if column.is_words else "right", overflow="fold")
    for row, texts in zip(table.rows, table.texts(), strict=True):
        cells = [escape(text) for text in texts]
        shown.add_row(*(f"[bold]{text}[/]" if cell.is_best else text for cell, text in zip(row, cells, strict=True)))
    return shown


def to_markdown(tables: Sequence[Table], heading: str = "##") -> str:
    """Return tables as Markdown, each under a heading, its notes below."""
    parts = []
    for table in tables:
        lines = [f"{heading} {table.title}", ""]
        lines.append(_pipes(column.title for column in table.columns))
        lines.append(_pipes("---" if column.is_words else "---:" for column in table.columns))
        for row, texts in zip(table.rows, table.texts(), strict=True):
            shown = (text.replace("|", r"\|") for text in texts)
            pairs = zip(row, shown, strict=True)
            lines.append(_pipes(f"**{text}**" if cell.is_best and text else text for cell, text in pairs))
        lines += ["", *(f"- {note}" for note in table.notes)]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts) + "\n"


def to_csv(tables: Sequence[Table]) -> str:
    """Return tables as one CSV file, a line per cell with its full precision, so that any program can read it."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["table", "row", "column", "value", "std", "low", "high", "text"])
    for table in tables:
        for row in table.rows:
            for column, cell in list(zip(table.columns, row, strict=True))[1:]:
                numbers = [_number(number) for number in (cell.value, cell.std, cell.low, cell.high)]
                if any(numbers) or cell.text:
                    writer.writerow([table.title, row[0].text, column.name, *numbers, cell.text])
    return file.getvalue()


def to_latex(tables: Sequence[Table]) -> str:
    r"""Return tables as LaTeX; the document needs \usepackage{booktabs}."""
    parts = []
    for table in tables:
        lines = [
            r"\begin{table}[htbp]",
            r"\centering",
            rf"\caption{{{latex(table.title)}}}",
            rf"\begin{{tabular}}{{{''.join('l' if column.is_words else 'r' for column in table.columns)}}}",
            r"\toprule",
            _ampersands(latex(column.title) for column in table.columns),
            r"\midrule",
        ]
        for row, texts in zip(table.rows, table.texts(), strict=True):
            pairs = zip(row, map(latex, texts), strict=True)
            lines.append(_ampersands(rf"\textbf{{{text}}}" if cell.is_best and text else text for cell, text in pairs))
        lines += [r"\bottomrule", r"\end{tabular}"]
        if table.notes:
            lines += [r"", r"\smallskip", r"\begin{minipage}{\linewidth}\footnotesize"]
            lines += [latex(note) + r"\\" for note in table.notes]
            lines += [r"\end{minipage}"]
        lines += [r"\end{table}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def latex(text: str) -> str:
    """Return text with everything escaped that LaTeX would misunderstand."""
    parts = ("".join(_LATEX.get(char, char) for char in part) for part in text.split("Δ_m"))
    return r"$\Delta_m$".join(parts)


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ampersands(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)


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
