"""Symbols are explained where a page shows them first."""

from __future__ import annotations

import html
import re

import pytest

import report_samples as samples
from forkmerge.report import Page, page_from, to_html
from forkmerge.report.diagnosis_page import diagnosis_page
from forkmerge.report.run_page import run_page
from forkmerge.report.symbols import SYMBOLS, explained_in, symbols_in
from paths import ROOT

pytest.importorskip("plotly")


def shown_parts(page: Page) -> list[str]:
    """The text of every table and figure, in the order of the page."""
    main = to_html(page).partition("<main>")[2].partition("</main>")[0]
    parts = re.findall(
        r'<figure.*?</figure>|<div class="table">.*?</ul></div>|<div class="table">.*?</table></div>', main, re.S
    )
    return [html.unescape(re.sub(r"<(li|div|p|h\d|td|th)\b[^>]*>", "\n", part)) for part in parts]


def pages(folder) -> list[Page]:
    return [
        diagnosis_page(samples.diagnosis(), folder),
        run_page(samples.saved_run(3, 3)),
        page_from(ROOT / "results" / "census.json"),
    ]


def test_every_symbol_is_explained_in_the_first_table_or_figure_that_shows_it(tmp_path):
    total = set()
    for page in pages(tmp_path):
        seen: set[str] = set()
        for part in shown_parts(page):
            text = re.sub(r"<[^>]*>", "", part)
            new = set(symbols_in([text])) - seen
            assert new <= explained_in([line.strip() for line in text.split("\n")]), (page.title, new)
            seen |= new
        total |= seen
    assert {"TG", "CSD", "Δ_m", "Δ", "λ"} <= total


def test_a_symbol_is_a_word_of_its_own():
    assert symbols_in(["STG, λs, Δ_max, Δ2, w–t–l–x"]) == []
    assert symbols_in(["(TG)", "λ,", "Δ_m/(B−1)", "Δt"]) == ["Δ_m", "Δt", "TG", "λ"]


def test_meanings_are_sentences_without_an_end():
    assert all(meaning and not meaning.endswith(".") for meaning in SYMBOLS.values())
