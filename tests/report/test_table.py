"""One table in four forms, each safe from what names may contain."""

from __future__ import annotations

import csv
import io

from rich.console import Console

from forkmerge.algorithms.table_data import Cell, Column, Table
from forkmerge.report.table import latex, to_csv, to_latex, to_markdown, to_rich

TABLE = Table(
    "50% of a_b & c",
    (
        Column("method", is_words=True),
        Column("mIoU", 1),
        Column("error", -1),
        Column("Δ_m", scale=100.0, decimals=2, signed=True),
    ),
    (
        (Cell(text="STL|x"), Cell(51.4231, 0.5), Cell(0.05), Cell(-1e-9, low=-0.01, high=0.02)),
        (Cell(text="[bold]Auto-λ"), Cell(9.5, 0.25, is_best=True), Cell(), Cell(0.0403)),
    ),
    ("read ↑ as better",),
)


def test_numbers_have_the_digits_that_the_largest_of_the_column_needs():
    assert TABLE.texts() == [
        ["STL|x", "51.42 ± 0.50", "0.05000", "0.00 [−1.00, +2.00]"],
        ["[bold]Auto-λ", "9.50 ± 0.25", "", "+4.03"],
    ]


def test_markdown_is_a_table_whose_cells_cannot_break_it():
    assert to_markdown([TABLE]).splitlines() == [
        "## 50% of a_b & c",
        "",
        "| method | mIoU ↑ | error ↓ | Δ_m |",
        "| --- | ---: | ---: | ---: |",
        r"| STL\|x | 51.42 ± 0.50 | 0.05000 | 0.00 [−1.00, +2.00] |",
        "| [bold]Auto-λ | **9.50 ± 0.25** |  | +4.03 |",
        "",
        "- read ↑ as better",
    ]


def test_csv_has_a_line_per_cell_with_all_digits():
    rows = list(csv.DictReader(io.StringIO(to_csv([TABLE, TABLE]))))
    assert len(rows) == 2 * 5
    assert rows[0] == {
        "table": "50% of a_b & c",
        "row": "STL|x",
        "column": "mIoU",
        "value": "51.4231",
        "std": "0.5",
        "low": "",
        "high": "",
        "text": "",
    }
    assert float(rows[2]["value"]) == -1e-9


def test_latex_is_escaped_and_booktabs():
    text = to_latex([TABLE])
    assert r"\caption{50\% of a\_b \& c}" in text
    assert r"method & mIoU $\uparrow$ & error $\downarrow$ & $\Delta_m$ \\" in text
    assert r"{[}bold]Auto-$\lambda$ & \textbf{9.50 $\pm$ 0.25} &  & +4.03 \\" in text
    assert r"0.00 [$-$1.00, +2.00] \\" in text
    assert text.count(r"\begin") == text.count(r"\end") == 3


def test_every_character_that_latex_reads_is_escaped():
    assert latex(r"\&%$#_{}~^") == r"\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}"


def test_text_cannot_become_an_argument_of_a_row_or_end_it_in_latex():
    assert latex("[2cm] x") == "{[}2cm] x"
    assert latex("* x") == "{*} x"
    assert latex("a [b] * c") == "a [b] * c"
    assert latex("a\n\n  b\x1b") == r"a b\textbackslash{}u001b"


def test_cells_of_a_spreadsheet_are_no_formulas_and_numbers_stay_numbers():
    formulas = ("=1+1", "+cmd|' /C calc'!A0", "-2+3+cmd", "@SUM(1)", "\t=1", "\r=1")
    columns = Column("method", is_words=True), *(Column(text) for text in formulas), Column("n")
    rows = tuple((Cell(text=text), *(Cell(text=text) for _ in formulas), Cell(-0.5, low=-1e-9)) for text in formulas)
    written = list(csv.reader(io.StringIO(to_csv([Table("=HYPERLINK(1)", columns, rows)]))))
    assert len(written) == 1 + len(formulas) * (len(formulas) + 1)
    for title, row, column, value, _, low, _, text in written[1:]:
        assert title == "'=HYPERLINK(1)"
        assert row.startswith("'")
        assert column == "n" or column.startswith("'")
        assert (value, low) == (("-0.5", "-1e-09") if column == "n" else ("", ""))
        assert text == "" or text.startswith("'")


def test_the_terminal_shows_names_as_they_are():
    console = Console(width=100, record=True, force_terminal=True, file=io.StringIO())
    console.print(to_rich(TABLE))
    assert "[bold]Auto-λ" in console.export_text()
