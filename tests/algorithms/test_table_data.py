"""The one format of numbers, alone and in tables."""

from __future__ import annotations

from forkmerge.algorithms.table_data import (
    Cell,
    Column,
    Table,
    for_markdown,
    for_spreadsheet,
    show_bytes,
    show_metrics,
    show_number,
    show_seconds,
    show_shares,
)


def test_numbers_alone_have_four_digits_and_none_is_a_dash():
    assert [show_number(value) for value in (0.123456, 12345.6, 0.0, None)] == ["0.1235", "1.235e+04", "0", "–"]
    assert show_metrics({"accuracy": 0.5, "loss": None}) == "accuracy 0.5, loss –"
    assert show_shares({"alone": 1 / 3, "aux": 2 / 3}) == "alone 0.33, aux 0.67"


def test_markdown_keeps_bars_inside_names_apart_from_those_of_the_table():
    columns = Column("a|b", is_words=True), Column("score")
    table = Table("t", columns, ((Cell(text="x|y"), Cell(0.5, is_best=True)),))
    assert table.markdown().splitlines() == [r"| a\|b | score |", "| --- | ---: |", r"| x\|y | **0.5000** |"]


def test_markdown_shows_text_as_it_is():
    assert for_markdown("a_b c_ _d __init__ Δ_m") == r"a_b c\_ \_d \_\_init\_\_ Δ_m"
    assert for_markdown("*x* `y` ~z~ a|b C:\\x") == r"\*x\* \`y\` \~z\~ a\|b C:\\x"
    assert for_markdown("[a](http://b) ![c](d) [e][f] [g]: h, [i=3], [−1, 2]") == (
        r"[a\](http://b) ![c\](d) [e\][f] [g\]: h, [i=3], [−1, 2]"
    )
    assert for_markdown("<script>x</script> <!-- 1 < 2 > 0") == r"\<script>x\</script> \<!-- 1 < 2 > 0"
    assert for_markdown("a\n# b\x1b") == r"a # b\\u001b"
    for text, shown in {"# a": r"\# a", "- a": r"\- a", "> a": r"\> a", "1. a": r"1\. a", "12) a": r"12\) a"}.items():
        assert for_markdown(text) == shown
    assert for_markdown("-1 and 1.5 a") == "-1 and 1.5 a"


def test_a_spreadsheet_sees_no_formula():
    for text in ("=1", "+a", "-a", "@a", "\ta", "\ra", "\na", "-2+3", "=-1", "-"):
        assert for_spreadsheet(text).startswith("'"), text
    for text in ("-1", "+1.5", "-1e-9", "-.5E+3", "a=1", "", "'x", "Δ_m", "3–1–0"):
        assert for_spreadsheet(text) == text
    assert for_spreadsheet("a\x1b") == r"a\u001b"


def test_durations_and_sizes_are_readable() -> None:
    assert [show_seconds(s) for s in (0.0012, 0.5, 42, 300, 9000, 400000)] == [
        "1.2 ms",
        "0.5 s",
        "42 s",
        "5 min",
        "2.5 h",
        "4.6 days",
    ]
    assert [show_bytes(n) for n in (12, 1500, 2_340_000, 7.1e12)] == ["12 bytes", "1.5 kB", "2.34 MB", "7.1 TB"]
