"""One table, four forms: for the terminal, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table as RichTable

from forkmerge.algorithms.table_data import Table, for_markdown, for_spreadsheet, show_in_full
from forkmerge.errors import printable

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
        notes = (f"- {for_markdown(note)}" for note in table.notes)
        lines = [f"{heading} {for_markdown(table.title)}", "", table.markdown(), "", *notes]
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
                numbers = [show_in_full(number) for number in (cell.value, cell.std, cell.low, cell.high)]
                if any(numbers) or cell.text:
                    names = [for_spreadsheet(text) for text in (table.title, row[0].text, column.name)]
                    writer.writerow([*names, *numbers, for_spreadsheet(cell.text)])
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
    line = re.sub(r"\s*\n\s*", " ", printable(text))
    parts = ("".join(_LATEX.get(char, char) for char in part) for part in line.split("Δ_m"))
    # After the end of a row, a bracket or an asterisk would be an argument of it.
    return re.sub(r"^\s*([\[*])", r"{\1}", r"$\Delta_m$".join(parts))


def _ampersands(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"
