"""The one format of numbers, alone and in tables."""

from __future__ import annotations

from forkmerge.algorithms.table_data import Cell, Column, Table, show_metrics, show_number, show_shares


def test_numbers_alone_have_four_digits_and_none_is_a_dash():
    assert [show_number(value) for value in (0.123456, 12345.6, 0.0, None)] == ["0.1235", "1.235e+04", "0", "–"]
    assert show_metrics({"accuracy": 0.5, "loss": None}) == "accuracy 0.5, loss –"
    assert show_shares({"alone": 1 / 3, "aux": 2 / 3}) == "alone 0.33, aux 0.67"


def test_markdown_keeps_bars_inside_names_apart_from_those_of_the_table():
    columns = Column("a|b", is_words=True), Column("score")
    table = Table("t", columns, ((Cell(text="x|y"), Cell(0.5, is_best=True)),))
    assert table.markdown().splitlines() == [r"| a\|b | score |", "| --- | ---: |", r"| x\|y | **0.5000** |"]
