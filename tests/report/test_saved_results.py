"""Results of an analysis that join the page of their folder."""

from __future__ import annotations

import pytest

import report_samples as samples
from forkmerge.algorithms.table_data import Table
from forkmerge.analysis.merge_results import Survival
from forkmerge.errors import StoreError
from forkmerge.report import (
    page_from,
    save_result,
    to_html,
    write_figure,
)

pytest.importorskip("plotly")


pytest.importorskip("matplotlib")


def test_saved_results_join_the_page_of_their_folder(tmp_path):
    samples.write_diagnosis(tmp_path)
    for result in samples.saved_results():
        save_result(tmp_path, type(result).__name__, result)
    page = page_from(tmp_path)
    assert page.sections[-1].title == "Analysis"
    assert {"matrix", "saved-features", "saved-mixture", "saved-line", "plane", "saved-gain"} <= set(page.figures)
    tables = [item for item in page.sections[-1].items if isinstance(item, Table)]
    assert [table.rows[0][0].text for table in tables] == ["3", "3", "3"]
    to_html(page)
    assert write_figure(tmp_path, "saved-mixture", tmp_path / "a.svg").stat().st_size > 1000
    (tmp_path / "analysis" / "other.json").write_text("[]")
    with pytest.raises(StoreError, match=r"\.json holds no JSON object"):
        page_from(tmp_path)


def test_saved_histories_of_one_target_each_have_a_panel(tmp_path):
    samples.write_diagnosis(tmp_path)
    tasks = samples.names(3)
    for name in ("before", "after"):
        save_result(tmp_path, name, samples.history(tasks, 4))
    save_result(tmp_path, "other", samples.history(tasks[1:], 4))
    titles = [panel.title for panel in page_from(tmp_path).figures["coefficients"].panels]
    assert titles == ["task 00, after", "task 00, before", "task 01"]


def test_survival_says_how_often_the_data_was_halved(tmp_path):
    samples.write_diagnosis(tmp_path)
    save_result(tmp_path, "a", Survival(1, (0.1,) * 40, (0.1,) * 40, 0.1, 0.1, 1.0, "alone"))
    (table,) = page_from(tmp_path).sections[-1].items
    assert table.notes == ("Validation data halved 20 times; gains are over the branch alone.",)
