"""Runs on disk: listed, shown, exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from command_line import invoke


def test_no_runs_yet_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no runs in runs" in invoke("runs").stdout
    assert json.loads(invoke("runs", "--json").stdout) == []


def test_a_run_that_cannot_be_read_does_not_hide_the_others(tiny: Any) -> None:
    invoke("run", "tiny:recipe", "--steps", "2")
    invoke("run", "tiny:recipe", "--steps", "2")
    Path("runs/tiny-forkmerge-seed0/config.json").write_text("{")
    rows = json.loads(invoke("runs", "--json").stdout)
    assert [row["status"] for row in rows] == ["unreadable", "finished"]
    assert "unreadable" in invoke("runs").stdout


def test_an_algorithm_made_of_several_runs_is_one_line_and_its_parts_are_listed_on_request(tiny: Any) -> None:
    done = invoke("run", "tiny:recipe", "--algorithm", "PostTrain", "--steps", "8", "--out", "runs/p")
    assert re.search(r"test +accuracy", done.stdout)
    assert [row["name"] for row in json.loads(invoke("runs", "--json").stdout)] == ["p"]
    names = [row["name"] for row in json.loads(invoke("runs", "runs/p", "--json").stdout)]
    assert names == ["p", "finetuning", "pretraining"]
