"""The tables of a comparison."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import compare_problem
from forkmerge.experiments.comparison import Comparison, plan_comparison, run_comparison
from forkmerge.experiments.run_results import RunResult, read_run_results
from forkmerge.report.comparison_tables import summary_from, tables_from, write_tables

PROBLEM = "compare_problem:recipe"


@pytest.fixture(autouse=True)
def _clean():
    compare_problem.stop_at.clear()
    compare_problem.test_reads.clear()


def planned(**options: Any) -> Comparison:
    return plan_comparison(PROBLEM, **{"methods": "ew,forkmerge", "seeds": 2, **options})


def compared(out: Path, comparison: Comparison | None = None, **options: Any) -> list[RunResult]:
    run_comparison(comparison or planned(**options), out)
    return read_run_results(out)


def test_tables_come_from_the_records_alone(tmp_path):
    compared(tmp_path)
    write_tables(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("comparison.*")}
    assert set(before) == {"comparison.md", "comparison.csv", "comparison.tex", "comparison.json"}
    for folder in (tmp_path / "tgt").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    for name in before:
        (tmp_path / name).unlink()
    write_tables(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("comparison.*")} == before
    assert json.loads(before["comparison.json"])["baseline"] == "STL"


def test_without_a_test_split_validation_is_shown_and_said_so(tmp_path):
    compared(tmp_path, settings={"arguments": {"test": False}}, seeds=1)
    assert summary_from(tmp_path).split == "validation"
    assert any("no test split" in note for note in tables_from(tmp_path)[0].notes)


def test_examples_that_were_held_out_of_validation_are_not_called_a_test_split(tmp_path):
    compared(tmp_path, settings={"arguments": {"test": False}, "hold_out": 0.5}, seeds=1)
    assert summary_from(tmp_path).split == "held out"
    assert any("validation examples that were kept from all choices" in note for note in tables_from(tmp_path)[0].notes)
