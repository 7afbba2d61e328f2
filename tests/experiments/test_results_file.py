"""A comparison in one file: all tables again from it alone, in a fixed order, without paths of a machine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from command_line import error_of, invoke
from forkmerge.experiments.comparison import plan_comparison, run_comparison
from forkmerge.experiments.results_file import read_comparison, to_text, without_paths, write_records
from forkmerge.report.comparison_tables import tables_from, write_tables
from forkmerge.report.table import to_markdown

PROBLEM = "compare_problem:recipe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    out = tmp_path_factory.mktemp("records") / "out"
    settings = {"arguments": {"broken": 1}}
    plan = plan_comparison(
        PROBLEM, methods="ew,forkmerge-aux", targets="all", seeds=2, tune={"interval": [2, 3]}, settings=settings
    )
    run_comparison(plan, out)
    return out


def test_the_tables_of_the_file_are_those_of_the_folder(folder, tmp_path):
    file = tmp_path / "results" / "small.json"
    write_records(folder, file)

    def text(tables: Any) -> str:
        return re.sub(r"failed: .*", "", to_markdown(tables))

    assert text(tables_from(file)) == text(tables_from(folder))
    shown = invoke("compare", file, code=1).stdout  # some of its runs have failed
    assert "target: tgt" in shown
    assert "written to" not in shown
    assert list(file.parent.iterdir()) == [file]
    assert json.loads(invoke("compare", file, "--json", code=1).stdout)["files"] == []


def test_the_file_has_one_line_per_run_in_the_order_of_the_plan(folder, tmp_path):
    plan, outcomes = read_comparison(folder)
    text = to_text(plan, outcomes)
    assert to_text(plan, list(reversed(outcomes))) == text
    lines = text.splitlines()
    records = [json.loads(line.rstrip(",")) for line in lines if line.startswith('{"method"')]
    assert len(records) == len(outcomes)
    words = [method["word"] for method in plan["methods"]]
    keys = [(plan["targets"].index(r["target"]), words.index(r["method"]), r["seed"]) for r in records]
    assert keys == sorted(keys)
    file = tmp_path / "a.json"
    file.write_text(text)
    again = to_text(*read_comparison(file))
    assert again == text
    assert str(tmp_path.parent) not in text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("cannot read /home/me/x.npz: gone", "cannot read x.npz: gone"),
        ("in '/tmp/a b/c'", "in 'a b/c'"),
        (r"C:\Users\me\x.npz", "x.npz"),
        ("~/data/pacs", "pacs"),
        ("forkmerge.datasets.pacs:recipe, 1/2, B/(B-1), a/b", "forkmerge.datasets.pacs:recipe, 1/2, B/(B-1), a/b"),
    ],
)
def test_absolute_paths_are_cut_down_to_names(text, clean):
    assert without_paths(text) == clean


def test_errors_and_settings_do_not_give_paths_away(folder):
    plan, outcomes = read_comparison(folder)
    plan = {**plan, "settings": {**plan["settings"], "arguments": {"root": "/home/me/data"}}}
    failed = replace(outcomes[0], error="no file /home/me/data/x.npz", details="File /home/me/lib.py", notes=["/a/b/c"])
    assert "/home" not in to_text(plan, [failed, *outcomes[1:]])
    assert "/a/b" not in to_text(plan, [failed, *outcomes[1:]])


def test_the_command_keeps_records_while_it_runs(tmp_path):
    file, out = tmp_path / "r.json", tmp_path / "out"
    options = ("--methods", "ew", "--seeds", 1, "--workers", 1, "--out", out)
    invoke("compare", PROBLEM, *options, "--records", file)
    kept = file.read_text()
    assert len(read_comparison(file)[1]) == 2
    file.unlink()
    invoke("compare", out, "--records", file)
    assert file.read_text() == kept


def test_what_is_not_a_file_of_records_is_refused(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"format": 1}')
    with pytest.raises(fm.StoreError, match="is not a file of records"):
        write_tables(file)
    assert "is not the folder of a comparison" in error_of("compare", tmp_path / "missing.json")
