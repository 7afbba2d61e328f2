"""The page of a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import report_samples as samples
from command_line import invoke
from forkmerge.experiments.verdict import MetricVerdict, Verdict
from forkmerge.report import (
    page_from,
    to_html,
)
from forkmerge.report.run_page import run_page, use_of

pytest.importorskip("plotly")


pytest.importorskip("matplotlib")


def test_a_run_folder_becomes_a_page_with_the_command_that_made_it(tmp_path):
    folder = tmp_path / "a run"
    said = invoke("run", "compare_problem:recipe", "--out", folder).output
    assert f"report '{folder}'" in said
    assert invoke("report", folder).output.strip() == str(folder / "report.html")
    page = page_from(folder)
    assert set(page.figures) == {"coefficients", "relevance", "scores", "losses"}
    assert page.headline.startswith("ForkMerge on tgt reached accuracy")
    assert page.commands is not None
    assert page.commands["this page"] == f"forkmerge report '{folder}'"
    assert page.commands["this run"]
    assert page.environment is not None
    assert page.environment["torch"]
    text = (folder / "report.html").read_text("utf-8")
    assert text.count("<html") == 1
    assert json.loads(invoke("report", folder, "--out", tmp_path / "new" / "b.html", "--json").output)["file"].endswith(
        "b.html"
    )


def test_tasks_are_called_used_or_refused_against_equal_coefficients():
    many = samples.saved_run(40, 30).run
    assert many is not None
    words = use_of(many)
    assert words["task 01"] == "used"
    assert len(words) == 39


def test_a_page_of_forty_tasks_and_five_hundred_rounds_is_small():
    assert len(to_html(run_page(samples.saved_run(40, 500))).encode()) < 10e6


def test_a_falling_validation_curve_is_commented_on_beside_it_in_the_words_of_the_record():
    saved = samples.saved_run(3, 4)
    assert saved.run is not None
    rounds = [replace(r, score=score) for r, score in zip(saved.rounds, (0.5, 0.8, 0.7, 0.6), strict=True)]
    fallen = replace(saved, run=replace(saved.run, rounds=rounds), rounds=rounds)
    page = run_page(fallen)
    assert fallen.run is not None
    (remark,) = fallen.run.remarks
    assert 'select="best"' in remark
    assert page.figures["scores"].caption.lower().endswith(remark.lower())
    assert remark not in page.notes, "it is said once"
    assert 'select="best"' not in run_page(samples.saved_run(3, 1)).figures["scores"].caption


def test_errors_are_drawn_and_listed_as_errors_and_the_best_branch_is_the_lowest():
    def erring(saved):
        def turned(record):
            score = None if record.score is None else -abs(record.score)
            return replace(record, score=score, metrics={} if score is None else {"mae": -score})

        rounds = [
            replace(turned(r), branches={name: turned(b) for name, b in r.branches.items()}, floor_score=-0.5)
            for r in saved.rounds
        ]
        return replace(saved, run=replace(saved.run, rounds=rounds), rounds=rounds)

    for tasks in (3, 40):
        saved = erring(samples.saved_run(tasks, 4))
        figure = run_page(saved).figures["scores"]
        (panel,) = figure.panels
        assert (figure.title, panel.y.title) == ("Validation mae", "mae")
        assert all(value is None or value >= 0 for line in panel.series for value in line.y)
        assert "never above its best branch" in figure.caption
        lines = {line.name: line.y for line in panel.series}
        assert "The floor is training on the target alone" in figure.caption
        assert lines["floor"] == (0.5, 0.5, 0.5, 0.5)
        if "best branch" in lines:
            assert all(best < worst for best, worst in zip(lines["best branch"], lines["worst branch"], strict=True))
    assert " Its last validation mae is 0." in run_page(replace(saved, run=None)).headline


def test_the_page_says_first_whether_the_run_helped():
    saved = samples.saved_run(2, 3)
    metrics = [MetricVerdict("error", -1, 0.2, 0.25, -0.07, -0.03), MetricVerdict("auc", 1, 0.8, 0.8, -0.1, 0.1)]
    run = replace(saved.run, verdict=Verdict(metrics, 1000, 3.5).to_json())
    page = run_page(replace(saved, run=run))
    (table,) = page.sections[0].items
    assert page.sections[0].title == "Did it help?"
    assert [[cell.text or cell.value for cell in row][:4] for row in table.rows] == [
        ["error ↓", "better", 0.25, 0.2],
        ["auc ↑", "no difference shown", 0.8, 0.8],
    ]
    assert (table.rows[0][4].low, table.rows[0][4].high) == (-0.07, -0.03)
    assert "It is better than single-task training." in page.headline
    assert any("one seed" in note.lower() for note in table.notes)
    assert "Did it help?" not in [section.title for section in run_page(saved).sections]
    held_out = replace(run, test={"error": 0.2}, verdict=Verdict(metrics, 40, 3.5, is_held_out=True).to_json())
    where = "reached error 0.2 on 40 validation examples that the search did not see"
    assert where in run_page(replace(saved, run=held_out)).headline
    worse = replace(metrics[1], low=-0.2, high=-0.1)
    mixed = replace(run, verdict=Verdict([metrics[0], worse], 1000, 3.5).to_json())
    assert "better in error and worse in auc than single-task" in run_page(replace(saved, run=mixed)).headline
    undecided = replace(run, verdict=Verdict(metrics[1:], 1000, 3.5).to_json())
    assert "No difference to single-task training is shown." in run_page(replace(saved, run=undecided)).headline
