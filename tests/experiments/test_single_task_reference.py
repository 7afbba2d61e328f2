"""Early stopping is no transfer: a method is compared with single-task training whose model is selected alike."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import compare_problem
import forkmerge as fm
from forkmerge.algorithms.equal_compute import Averaged, BestOf
from forkmerge.experiments.comparison import Comparison, plan_comparison, run_comparison
from forkmerge.experiments.cost_of_comparison import estimate_comparison
from forkmerge.experiments.paired_statistics import relative_change
from forkmerge.experiments.run_results import read_plan, read_run_results
from forkmerge.experiments.single_task_reference import steps_between_choices
from forkmerge.report.comparison_page import comparison_page
from forkmerge.report.comparison_tables import summary_from, tables_from, write_tables
from forkmerge.report.page import to_html

PROBLEM = "compare_problem:recipe"
UNSTEADY = {"optimizer": {"lr": 3.0}}
"""With such steps the last weights are rarely the best ones."""


@pytest.fixture(autouse=True)
def _clean():
    compare_problem.stop_at.clear()


def planned(methods: str, **options: Any) -> Comparison:
    return plan_comparison(PROBLEM, methods=methods, **{"seeds": 1, **options})


def words(comparison: Comparison) -> list[str]:
    return [method.word for method in comparison.methods]


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        (fm.SingleTask(20), None),
        (fm.SingleTask(20, select="best"), 20),
        (fm.SingleTask(select="best"), 20),
        (fm.Joint(interval=10, select="best"), 10),
        (fm.PostTrain(select="best"), 20),
        (fm.WeightGrid(interval=50, select="best"), 50),
        (fm.ForkMerge("mixed", interval=10), None),
        (fm.ForkMerge("mixed", interval=10, select="best"), 10),
        (fm.ForkMerge("mixed", interval=10, checkpoint="best_so_far"), 2),
        (fm.ForkMerge("mixed", interval=10, checkpoint="best_in_interval", validate_every=5, select="best"), 5),
        (fm.ForkMerge("mixed", interval=100, select="best"), None),  # the only look is at the last step
        (BestOf(fm.SingleTask(20, select="best"), 2), 20),
        (BestOf(fm.SingleTask(20), 2), None),
        (Averaged(fm.SingleTask(10, select="best"), 2), 10),
    ],
)
def test_how_often_an_algorithm_may_stop_early_is_read_from_its_options(algorithm, steps):
    assert steps_between_choices(algorithm, 100) == steps


def test_where_all_methods_select_alike_nothing_is_added():
    assert words(planned("ew,forkmerge")) == ["stl", "ew", "forkmerge"]
    alike = planned("ew,forkmerge", settings={"algorithm": {"select": "best"}})
    assert words(alike) == ["stl", "ew", "forkmerge"]
    assert not any("references" in method for method in alike.to_json()["methods"])


@pytest.mark.parametrize("word", ["forkmerge", "ew", "posttrain", "pcgrad", "stl-best:2"])
def test_a_row_that_selects_brings_the_single_task_training_that_selects_alike(word):
    comparison = planned(f"{word}[select=best]")
    assert words(comparison) == ["stl", "stl[select=best]", f"{word}[select=best]"]
    (entry,) = (each for each in comparison.to_json()["methods"] if each["word"] == f"{word}[select=best]")
    assert entry["references"] == {"": "stl[select=best]"}


def test_a_reference_is_used_once_and_one_that_was_asked_for_is_not_added():
    assert words(planned("stl[select=best],ew[select=best],forkmerge[select=best]")) == [
        *("stl", "stl[select=best]", "ew[select=best]", "forkmerge[select=best]")
    ]


def test_single_task_training_that_selects_is_its_own_reference(tmp_path):
    run_comparison(planned("ew,stl[interval=1,select=best]", seeds=2, settings=UNSTEADY), tmp_path)
    row = summary_from(tmp_path).overall[-1]
    assert (row.label, row.reference, row.to_baseline) == ("STL[interval=1,select=best]", None, None)
    assert row.change.mean == pytest.approx(0.0)


def test_the_reference_looks_at_validation_as_often():
    assert words(planned("forkmerge[interval=2,select=best]"))[1] == "stl[interval=2,select=best]"
    assert words(planned("forkmerge[checkpoint=best_so_far]"))[1] == "stl[interval=1,select=best]"


def test_a_row_without_selection_has_a_reference_without_it():
    comparison = planned("ew[select=last]", settings={"algorithm": {"select": "best"}})
    assert words(comparison) == ["stl", "stl[select=last]", "ew[select=last]"]


def test_every_interval_that_tuning_may_choose_has_its_reference():
    comparison = planned("forkmerge[select=best]", tune={"interval": [2, 3]})
    assert words(comparison) == ["stl", "stl[interval=2,select=best]", "stl[select=best]", "forkmerge[select=best]"]
    (entry,) = (each for each in comparison.to_json()["methods"] if each["word"] == "forkmerge[select=best]")
    assert entry["references"] == {
        "[interval=2]": "stl[interval=2,select=best]",
        "[interval=3]": "stl[select=best]",
    }


def test_where_selection_itself_is_tuned_references_are_those_that_do_not_choose():
    comparison = planned("ew", tune={"select": ["last", "best"]})
    assert words(comparison) == ["stl", "stl[select=last]", "stl[select=best]", "ew"]
    (entry,) = (each for each in comparison.to_json()["methods"] if each["word"] == "ew")
    assert entry["references"] == {"[select=last]": "stl[select=last]", "[select=best]": "stl[select=best]"}


def test_equal_compute_selects_as_the_forkmerge_beside_it():
    names = words(planned("forkmerge[select=best]", equal_compute=True))
    assert names == [
        *("stl", "stl[select=best]", "forkmerge[select=best]"),
        *("forkmerge-uniform[select=best]", "forkmerge-once[select=best]"),
        *("stl-best:2[select=best]", "posttrain-best:2[select=best]", "stl-average:2[select=best]"),
        *("posttrain-average:2[select=best]", "joint-then-alone-average:2[select=best]"),
    ]


def test_the_dry_run_counts_the_reference():
    cost = estimate_comparison(planned("forkmerge[select=best]", seeds=2), workers=1)
    assert [(each.method, each.runs) for each in cost.methods] == [
        *(("stl", 2), ("stl[select=best]", 2), ("forkmerge[select=best]", 2))
    ]
    assert cost.runs == 6


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison in which early stopping changes single-task training itself."""
    folder = tmp_path_factory.mktemp("selected")
    run_comparison(planned("ew,ew[interval=1,select=best],forkmerge", seeds=3, settings=UNSTEADY), folder)
    return folder


def test_where_all_select_alike_the_tables_say_so(tmp_path):
    run_comparison(planned("ew", settings={"algorithm": {"select": "best"}}), tmp_path / "best")
    run_comparison(planned("ew"), tmp_path / "last")
    said = "Validation chose every model among those of its training, that of STL, too, as often"
    for name, count in (("best", 2), ("last", 0)):
        notes = [note for table in tables_from(tmp_path / name) for note in table.notes]
        assert sum(said in note for note in notes) == count


def test_gains_are_against_the_mean_of_the_reference(selected):
    results = [result for result in read_run_results(selected) if result.kind == "final"]
    own = {result.seed: result for result in results if result.method == "ew[interval=1,select=best]"}
    base = [result.metrics for result in results if result.method == "stl[interval=1,select=best]"]
    assert base != [result.metrics for result in results if result.method == "stl"]  # early stopping does something
    mean = {name: fmean(metrics[name] for metrics in base) for name in base[0]}
    by_hand = fmean(relative_change(own[seed].metrics, mean, own[seed].directions) for seed in own)
    summary = summary_from(selected)
    for standings in (summary.targets["tgt"], summary.overall):
        by_word = {standing.method: standing for standing in standings}
        row = by_word["ew[interval=1,select=best]"]
        assert row.reference == "STL[interval=1,select=best]"
        assert row.change.mean == pytest.approx(by_hand)
        assert row.to_baseline.mean == pytest.approx(by_hand)
        assert row.rival == "STL[interval=1,select=best]"  # the only other one that selects alike
        assert by_word["forkmerge"].reference == by_word["ew"].reference == "STL"
        assert by_word["stl[interval=1,select=best]"].to_baseline is None
        assert by_word["stl[interval=1,select=best]"].change.mean == pytest.approx(0.0)


def test_single_task_training_that_stops_early_gains_nothing_by_it(tmp_path):
    """The whole point: the same training, with and without early stopping, is no transfer."""
    run_comparison(
        planned("ew[interval=1,select=best,task_weights={tgt=1,aux=0,odd=0}]", seeds=2, settings=UNSTEADY), tmp_path
    )
    row = summary_from(tmp_path).overall[-1]
    assert row.to_baseline.mean == 0
    assert row.to_baseline.ties == 2


def test_tables_and_exports_say_which_reference_a_row_has(selected):
    for table in tables_from(selected):
        index = [column.name for column in table.columns].index("compared with")
        cells = {row[0].text: row[index].text for row in table.rows}
        assert cells["EW[interval=1,select=best]"] == "STL[interval=1,select=best]"
        assert cells["EW"] == cells["ForkMerge"] == "STL"
        assert not cells["STL"]
        assert not cells["STL[interval=1,select=best]"]
        assert any("same selection" in note for note in table.notes)
        assert any("is ForkMerge for STL, EW; " in note or "is EW for STL, ForkMerge; " in note for note in table.notes)
    write_tables(selected)
    for name in ("comparison.md", "comparison.csv", "comparison.tex"):
        assert "compared with" in (selected / name).read_text("utf-8")


def test_the_page_says_which_reference_a_row_has(selected):
    page = comparison_page(selected)
    table = page.sections[0].items[0]
    index = [column.name for column in table.columns].index("compared with")
    cells = {row[0].text: row[index].text for row in table.rows}
    assert cells == {
        "EW": "STL",
        "ForkMerge": "STL",
        "EW[interval=1,select=best]": "STL[interval=1,select=best]",
    }
    assert "STL with the same selection" in to_html(page)


def test_without_selection_no_table_has_another_column(tmp_path):
    run_comparison(planned("ew"), tmp_path)
    assert all("compared with" not in [column.name for column in table.columns] for table in tables_from(tmp_path))


def test_a_folder_of_before_gets_the_reference_when_it_is_continued(tmp_path):
    comparison = planned("ew[select=best]")
    old = comparison.__class__(
        **{**vars(comparison), "methods": tuple(m for m in comparison.methods if m.base != "stl" or not m.options)}
    )
    old = old.__class__(**{**vars(old), "references": {}})
    run_comparison(old, tmp_path)
    assert summary_from(tmp_path).overall[-1].reference == "STL"
    run_comparison(comparison, tmp_path)
    plan = read_plan(tmp_path)
    assert plan is not None
    assert [each["word"] for each in plan["methods"]] == [
        "stl",
        "ew[select=best]",
        "stl[select=best]",
    ]
    by_word = {standing.method: standing for standing in summary_from(tmp_path).overall}
    assert by_word["ew[select=best]"].reference == "STL[select=best]"
