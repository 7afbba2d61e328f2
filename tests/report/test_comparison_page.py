"""The page of a comparison."""

from __future__ import annotations

from dataclasses import replace

import pytest

import compare_problem
from command_line import invoke
from forkmerge.experiments.comparison import plan_comparison, run_comparison
from forkmerge.experiments.paired_statistics import Paired
from forkmerge.experiments.results_file import read_comparison, to_text, write_records
from forkmerge.experiments.summary import Standing
from forkmerge.report import (
    page_from,
    to_html,
    write_report,
)
from forkmerge.report.comparison_page import judge
from problems import Stopped

pytest.importorskip("plotly")


pytest.importorskip("matplotlib")


def test_a_comparison_folder_becomes_a_page_with_verdicts_curves_and_costs(comparison):
    page = page_from(comparison)
    assert set(page.figures) == {
        "change", "targets", "cost", "pareto", "learning", "coefficients", "relevance", "interval"
    }  # fmt: skip
    methods = page.figures["change"].panels[0].y.labels
    assert set(methods) == {"EW", "ForkMerge"}
    learning = page.figures["learning"].panels
    assert [panel.title for panel in learning] == ["tgt", "aux"]
    assert {series.name for series in learning[0].series} == {"STL", "EW", "ForkMerge"}
    # Two metrics: all curves are changes against STL's mean, so STL itself ends at 0 and the others do not start there.
    lines = {series.name: series.y for series in learning[0].series}
    assert lines["STL"][-1] == pytest.approx(0, abs=1e-9)
    assert lines["EW"][0] != 0
    assert page.facts["runs"] == "12 of 12"
    assert "STL" in page.headline
    assert write_report(comparison).stat().st_size < 10e6


def test_trade_offs_have_the_papers_axes_and_the_points_of_a_grid_beside_them(comparison, tmp_path):
    """Figure 12: the first metric of a task, or 1 / that where lower is better; a grid on one target is enough."""
    axes = lambda page: [(panel.x.title, panel.y.title) for panel in page.figures["pareto"].panels]  # noqa: E731
    assert axes(page_from(comparison)) == [("tgt: accuracy", "aux: 1 / loss")]
    out = tmp_path / "out"
    for methods, targets in (("ew", "all"), ("grid", "tgt")):
        run_comparison(plan_comparison("compare_problem:recipe", methods=methods, targets=targets, seeds=1), out)
    page = page_from(out)
    assert axes(page) == [("tgt: accuracy", "aux: 1 / loss")]
    series = {series.name: series for series in page.figures["pareto"].panels[0].series}
    assert len(series["grid"].x) == 27
    (run,) = [each for each in read_comparison(out)[1] if each.method == "ew" and each.target == "aux"]
    assert series["EW"].y == pytest.approx([1 / run.validation["loss"]])
    equal = series["grid"].texts.index("1 : 1 : 1")
    assert series["grid"].y[equal] == pytest.approx(series["EW"].y[0])


def test_a_file_of_records_has_the_page_of_its_comparison(comparison, tmp_path):
    write_records(comparison, tmp_path / "small.json")
    page, whole = page_from(tmp_path / "small.json"), page_from(comparison)
    assert set(page.figures) == set(whole.figures) - {"relevance"}
    mine, theirs = (found.figures["coefficients"].panels[0].series for found in (page, whole))
    assert [series.name for series in mine] == [series.name for series in theirs]
    assert mine[0].y == pytest.approx(theirs[0].y, rel=1e-4)
    for one, other in zip(*(found.figures["learning"].panels for found in (page, whole)), strict=True):
        assert [s.name for s in one.series] == [s.name for s in other.series]
        assert one.series[1].y == pytest.approx(other.series[1].y, rel=1e-3, abs=1e-4)
    assert page.headline == whole.headline
    assert invoke("report", tmp_path / "small.json").output.strip() == str(tmp_path / "small.html")


def test_methods_that_differ_in_their_interval_show_its_effect(comparison, tmp_path):
    write_records(comparison, tmp_path / "a.json")
    plan, outcomes = read_comparison(tmp_path / "a.json")
    merged = [o for o in outcomes if o.method == "forkmerge" and o.kind == "final" and o.target == "tgt"]
    swept = [replace(o, method=f"fm[{i}]", label=f"ForkMerge[interval={i}]") for i in (2, 30) for o in merged]
    plan["methods"] += [{"word": f"fm[{i}]", "label": f"ForkMerge[interval={i}]"} for i in (2, 30)]
    kept = [o for o in outcomes if o.kind == "final"]
    (tmp_path / "b.json").write_text(to_text(plan, [*kept, *swept]))
    (panel,) = page_from(tmp_path / "b.json").figures["interval"].panels
    assert panel.title == "ForkMerge on tgt"
    assert panel.series[0].x == (2, 30)
    assert panel.series[0].y[0] == pytest.approx(sum(o.metrics["accuracy"] or 0.0 for o in merged) / 2)


def test_a_comparison_that_has_just_begun_has_a_page(tmp_path):
    planned = plan_comparison("compare_problem:recipe", methods="ew", seeds=1)
    compare_problem.stop_at.append((0, 2))
    with pytest.raises(Stopped):
        run_comparison(planned, tmp_path / "c")
    page = page_from(tmp_path / "c")
    assert page.facts["runs"].endswith("of 2")
    to_html(page)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.1, 0.2, "better"), (-0.2, -0.1, "worse"), (-0.1, 0.1, "no evidence"), (None, None, "no evidence")],
)
def test_a_method_is_better_only_where_the_interval_excludes_zero(low, high, word):
    standing = Standing("ew", "EW", {}, None, Paired(0.1, low, high, 1, 0, 0), None, None)
    assert judge(standing) == word
