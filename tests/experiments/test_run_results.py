"""What a comparison writes down about each of its runs, and reads back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import forkmerge as fm
from forkmerge.engine.storage.atomic_files import TEMPORARY
from forkmerge.experiments.comparison import plan_comparison, run_comparison
from forkmerge.experiments.run_results import RunResult, read_plan, read_run_result, read_run_results

RESULT = RunResult("stl", "STL", "t", 0, "final", {}, "t/a")


def test_records_hold_coefficients_curves_and_times(tmp_path):
    run_comparison(plan_comparison("compare_problem:recipe", methods="forkmerge-aux[interval=2]", seeds=1), tmp_path)
    results = {result.method: result for result in read_run_results(tmp_path)}
    merged = results["forkmerge-aux[interval=2]"]
    assert [each["end"] for each in merged.rounds] == [2, 4, 6]
    for each in merged.rounds:
        assert set(each["coefficients"]) == set(each["branches"]) == {"alone", "aux", "odd"}
        assert sum(each["coefficients"].values()) == pytest.approx(1)
        assert set(each["metrics"]) == {"accuracy", "loss"}
    assert set(merged.relevance) == {"tgt", "aux", "odd"}
    assert sum(merged.phases.values()) == pytest.approx(merged.seconds)
    single = results["stl"]
    assert [set(each) for each in single.rounds] == [{"end", "score", "metrics"}] * len(single.rounds)
    assert single.rounds[-1]["metrics"] == single.validation


def test_a_record_is_read_as_it_was_written(tmp_path):
    result = RunResult("ew", "EW", "t", 3, "tuning", {"lr": 0.1}, "t/b", metrics={"a": 0.5, "b": None}, memory=2.5)
    result.write(tmp_path)
    assert json.loads((tmp_path / "t" / "b-tuning.json").read_text())["outcome"]["setting"] == {"lr": 0.1}
    assert read_run_result(tmp_path, "t/b-tuning.json") == result
    assert read_run_result(tmp_path, "t/b.json") is None
    assert not result.is_complete


def test_numbers_that_are_not_finite_are_read_as_none(tmp_path):
    RunResult("ew", "EW", "t", 0, "final", {}, "t/b", relevance={"t": math.inf}, seconds=math.nan).write(tmp_path)
    (result,) = read_run_results(tmp_path)
    assert (result.relevance, result.seconds) == ({"t": None}, None)


def test_what_a_kill_leaves_of_a_record_is_not_read(tmp_path):
    RESULT.write(tmp_path)
    (tmp_path / "t" / f"{TEMPORARY}b.json").write_text('{"format": 1, "outc')
    assert read_run_results(tmp_path) == [RESULT]


def test_records_written_before_a_field_existed_are_read(tmp_path):
    old = {"method": "stl", "label": "STL", "target": "t", "seed": 0, "kind": "final", "setting": {}, "folder": "t/a"}
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.json").write_text(json.dumps({"format": 1, "outcome": {**old, "unknown": 1}}))
    assert read_run_results(tmp_path) == [RESULT]


@pytest.mark.parametrize(
    ("file", "key", "read"), [("t/a.json", "outcome", read_run_results), ("plan.json", "plan", read_plan)]
)
def test_a_record_that_lacks_its_content_is_refused_by_name(tmp_path, file, key, read):
    (tmp_path / "t").mkdir()
    (tmp_path / file).write_text('{"format": 1}')
    with pytest.raises(fm.StoreError, match=rf"{Path(file).name} is not a record of a comparison: it lacks '{key}'"):
        read(tmp_path)
