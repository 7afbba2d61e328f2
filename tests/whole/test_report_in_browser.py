"""Pages in a real browser: they load from disk alone, figures are drawn, tables sort, names stay text."""

from __future__ import annotations

import pytest

import report_samples as samples
from chromium import PROGRAM, Chromium
from forkmerge.report import Page, Section, page_from, to_html
from forkmerge.report.diagnosis_page import diagnosis_page
from forkmerge.report.run_page import run_page
from paths import ROOT

pytest.importorskip("plotly")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = Chromium(tmp_path_factory.mktemp("profile"))
    yield program
    program.close()


def opened(browser, folder, page: Page, **options):
    path = folder / "report.html"
    path.write_text(to_html(page), "utf-8")
    tab = browser.open(path, **options)
    tab.draw_all()
    return tab


@pytest.fixture(scope="module")
def hostile(browser, tmp_path_factory):
    """Every figure there is, under names that try to be more than names."""
    page = run_page(samples.saved_run(6, 3, hostile=True))
    figures = Section("all", "", tuple(samples.all_figures(hostile=True)))
    whole = Page(page.title, "run", page.headline, page.facts, (*page.sections, figures))
    return opened(browser, tmp_path_factory.mktemp("hostile"), whole)


@pytest.fixture(scope="module")
def diagnosis(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnosis")
    return opened(browser, folder, diagnosis_page(samples.diagnosis(), folder), dark=True)


def test_every_figure_is_drawn_without_a_complaint_or_a_request(hostile):
    empty = "filter(plot => !plot.querySelector('.trace, .heatmaplayer image'))"
    assert hostile.run(f"[...document.querySelectorAll('.plot')].{empty}.map(plot => plot.dataset.figure)") == []
    assert hostile.run("document.querySelectorAll('.plot').length") > len(samples.all_figures())
    assert hostile.requests == []
    assert hostile.complaints == []


def test_a_task_named_like_a_script_stays_text(hostile):
    assert samples.HOSTILE[0] in hostile.run("document.querySelector('h1').textContent")
    assert samples.HOSTILE[1] in hostile.run("document.querySelector('.legend').textContent")
    drawn = hostile.run("[...document.querySelectorAll('.ytick text')].map(t => t.textContent).join('|')")
    assert samples.HOSTILE[0] in drawn
    assert samples.HOSTILE[3][:20] in drawn
    assert hostile.run("document.querySelectorAll('img, [onload], [onerror]').length") == 0


CUT = """[...document.querySelectorAll('.plot')].flatMap(plot => {
    const frame = plot.querySelector('.main-svg').getBoundingClientRect();
    return [...plot.querySelectorAll('.main-svg text')].filter(text => {
        const box = text.getBoundingClientRect();
        const outside = box.left < frame.left - 1 || box.right > frame.right + 1
            || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
        return box.width && outside && !text.closest('.hoverlayer');
    }).map(text => plot.dataset.figure + ': ' + text.textContent);
})"""
"""The texts that reach over the edge of their figure."""

OVERFLOWING = """[...document.querySelectorAll('.table')].filter(table => {
    const scroll = table.querySelector('.scroll');
    return scroll.scrollWidth > scroll.clientWidth;
}).map(table => table.querySelector('h3').textContent)"""
"""The tables that do not fit."""


def resized(tab, width):
    """Give a page another width, and wait until its figures are drawn for it."""
    tab.resize(width, 800)
    tab.wait(f"document.documentElement.clientWidth === {width}")
    narrow = "[...document.querySelectorAll('.plot')].every(p => p.dataset.narrow === String(p.clientWidth < 480)"
    tab.wait(f"{narrow} && Math.abs(p.querySelector('.main-svg').clientWidth - p.clientWidth) < 2)")


@pytest.mark.parametrize("width", [1280, 400, 360])
def test_nothing_is_wider_than_the_screen(hostile, width):
    resized(hostile, width)
    hostile.wait(f"document.documentElement.scrollWidth <= {width}")


@pytest.mark.parametrize("width", [1280, 400])
def test_no_label_of_a_figure_is_cut(hostile, width):
    resized(hostile, width)
    hostile.wait(f"{CUT}.length === 0", seconds=10)
    letters = "[...document.querySelectorAll('#figure-many .ytick text')].map(t => t.textContent).join('|')"
    drawn = hostile.run(letters).replace("\u00a0", " ").replace(" ", "")
    for name in samples.HOSTILE:
        assert name.replace(" ", "") in drawn, "all of it is written, over several lines"


@pytest.mark.parametrize("width", [1280, 400])
def test_names_in_tables_are_whole(hostile, width):
    resized(hostile, width)
    names = "[...document.querySelectorAll('td:first-child, th, .legend button')]"
    assert hostile.run(f"{names}.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)") == []


def test_the_tables_of_a_diagnosis_fit_a_screen_of_1280_pixels(diagnosis):
    resized(diagnosis, 1280)
    assert diagnosis.run(OVERFLOWING) == []
    assert diagnosis.run(CUT) == []


def test_the_tables_of_a_comparison_fit_a_screen_of_1280_pixels(browser, tmp_path):
    page = page_from(ROOT / "results" / "census.json")
    tab = opened(browser, tmp_path, page, width=1280)
    assert tab.run(OVERFLOWING) == []
    assert tab.run(CUT) == []
    assert "Costs" in tab.run("[...document.querySelectorAll('.table h3')].map(h => h.textContent)")


def test_tables_sort_by_number_and_by_word(diagnosis):
    column = "[...document.querySelectorAll('tbody tr')].map(r => r.cells[0].textContent)"
    orders = {0: [["clash", "mnist", "photos"], ["photos", "mnist", "clash"]]}
    orders[4] = [["mnist", "photos", "clash"], ["clash", "photos", "mnist"]]  # the gain at λ = 1, the largest first
    for number, (first, second) in orders.items():
        for order in (first, second):
            diagnosis.run(f"document.querySelectorAll('th button')[{number}].click()")
            assert diagnosis.run(column) == order
    assert diagnosis.run("document.querySelectorAll('th')[4].getAttribute('aria-sort')") == "ascending"


def test_the_theme_follows_the_system_and_then_the_switch(diagnosis):
    ground = "getComputedStyle(document.body).backgroundColor"
    line = "getComputedStyle(document.querySelector('.scatterlayer path.js-line')).stroke"
    assert diagnosis.run("document.documentElement.dataset.theme") == "dark"
    before, stroke = diagnosis.run(ground), diagnosis.run(line)
    diagnosis.run("document.getElementById('theme').click()")
    assert diagnosis.run(ground) != before
    diagnosis.wait(f"{line} !== {stroke!r}")
    diagnosis.run("document.getElementById('theme').click()")
    diagnosis.wait(f"{line} === {stroke!r}")
    assert diagnosis.complaints == []


def test_a_click_on_a_name_hides_its_line_in_all_panels(diagnosis):
    lines = "document.querySelectorAll('#figure-shift .scatterlayer .trace').length"
    before = diagnosis.run(lines)
    for compare in ("<", "==="):
        diagnosis.run("document.querySelector('#figure-shift .legend button').click()")
        diagnosis.wait(f"{lines} {compare} {before}")


def test_a_page_of_forty_tasks_and_five_hundred_rounds_works(browser, tmp_path):
    tab = opened(browser, tmp_path, run_page(samples.saved_run(40, 500)))
    assert tab.run("document.querySelectorAll('tbody')[1].rows.length") == 500
    tab.run("document.querySelectorAll('table')[1].querySelectorAll('th button')[1].click()")
    assert tab.run("document.querySelectorAll('tbody')[1].rows[0].cells[1].textContent") == "5000"
    assert tab.complaints == []
