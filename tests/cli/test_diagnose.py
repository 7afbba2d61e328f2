"""The command `forkmerge diagnose`, around a diagnosis that is not done here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import report_samples as samples
from command_line import error_of, invoke

PROBLEM = "compare_problem:recipe"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the diagnosis is asked for; it answers with a sample."""
    calls: list[dict[str, Any]] = []

    def answer(recipe: Any, folder: Path, **options: Any) -> Any:
        calls.append({"target": recipe.problem.target, "folder": folder, **options})
        return samples.diagnosis()

    monkeypatch.setattr("forkmerge.cli.diagnose.diagnose", answer)
    return calls


def test_options_reach_the_diagnosis_and_json_is_all_there_is(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("diagnose", PROBLEM, "--target", "aux", "--budget", "90s", "--workers", 1, "--json")
    data = json.loads(invoke(*words).stdout)
    assert data["folder"] == "runs/diagnose-compare_problem-aux"
    (call,) = asked
    assert (call["target"], call["budget"], call["executor"].workers) == ("aux", 90.0, 1)
    assert call["command"] == f"forkmerge diagnose {PROBLEM} --target aux --budget 90s --workers 1 --json"


def test_a_table_of_verdicts_is_printed_and_where_everything_is(asked, tmp_path):
    shown = invoke("diagnose", PROBLEM, "--out", tmp_path / "a d").stdout
    assert shown.startswith("What every auxiliary does to ")
    assert f"written to {tmp_path / 'a d' / 'diagnosis.json'}\n" in shown
    assert f"`forkmerge report '{tmp_path / 'a d'}'` writes a page with figures." in shown


def test_an_interruption_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(recipe: Any, folder: Path, **_: Any) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("forkmerge.cli.diagnose.diagnose", interrupted)
    shown = invoke("diagnose", PROBLEM, "--out", tmp_path / "d", code=130)
    typed = f"forkmerge diagnose {PROBLEM} --out {tmp_path / 'd'}"
    assert f"interrupted. What has ended is kept; continue with: {typed}\n" in shown.stderr


def test_a_budget_that_is_none_is_refused_before_anything_is_loaded():
    assert "--budget soon: write a duration" in error_of("diagnose", "nothere:recipe", "--budget", "soon")
