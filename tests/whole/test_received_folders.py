"""A folder of a run, a comparison or a diagnosis that comes from somebody else cannot harm who looks at it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
import report_samples as samples
from command_line import TINY, error_of, invoke
from forkmerge.algorithms.saved_run import list_saved_runs
from forkmerge.analysis.diagnosis.diagnosis import PLAN, RESULT
from forkmerge.analysis.diagnosis.pieces import FORMAT
from forkmerge.engine.storage.json_files import read_object, write_object, write_versioned
from forkmerge.report import save_result
from problems import Stopped, fit, stop_at


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, an interrupted one, a comparison and a diagnosis."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "tiny.py").write_text(TINY)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    quick = ("--set", "steps=4", "--set", "algorithm.interval=2")
    for words in (
        ("run", "tiny:recipe", *quick, "--out", "finished"),
        ("compare", "tiny:recipe", *quick, "--methods", "ew", "--seeds", "1", "--workers", "1", "--out", "comparison"),
    ):
        command = [sys.executable, "-m", "forkmerge.cli", *words]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    source = {"settings": {"recipe": "tiny:recipe"}, "folders": [str(folder)]}
    with pytest.raises(Stopped):
        fit(folder=folder / "interrupted", on_event=stop_at(6), source=source)
    write_versioned(folder / "diagnosis" / PLAN, FORMAT, {"about": {}, "plan": {}, "costs": {}})
    write_versioned(folder / "diagnosis" / RESULT, FORMAT, {"diagnosis": samples.diagnosis()})
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all of them, as the current folder."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


COMMANDS = {
    "finished": ("show", "report", "export", "resume"),
    "interrupted": ("show", "report", "resume"),
    "comparison": ("report", "compare"),
    "diagnosis": ("report",),
}
ENTRIES = {
    "finished": (
        "lock",
        "record.jsonl",
        "result.json",
        "config.json",
        "model.safetensors",
        "checkpoints",
        "report.html",
    ),
    "interrupted": (
        "lock",
        "record.jsonl",
        "config.json",
        "checkpoints",
        "result.json",
        "model.safetensors",
        "analysis",
    ),
    "comparison": ("plan.json", "tgt", "lock", "comparison.md", ".tmp-comparison.md", "tgt/stl-seed0.json"),
    "diagnosis": (RESULT, PLAN, "analysis", ".tmp-report.html", "report.html"),
}


def words_of(command: str, folder: str) -> list[str]:
    return [command, folder, *(["out"] if command == "export" else [])]


def test_they_are_shown_as_they_are(here: Path) -> None:
    for folder, commands in COMMANDS.items():
        for command in set(commands) - {"resume"}:
            invoke(*words_of(command, folder))


@pytest.mark.parametrize("folder", ENTRIES)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_are_refused_at_once_by_name_and_lead_nowhere(folder: str, kind: str, here: Path) -> None:
    for entry in ENTRIES[folder]:
        path, precious, aside = here / folder / entry, here / "precious", here / "aside"
        precious.write_text("mine")
        if path.exists():
            path.rename(aside)
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(aside if aside.exists() else precious)
        before = contents(here)
        for command in COMMANDS[folder]:
            assert f"{os.path.join(folder, entry)} is a {kind}: " in error_of(*words_of(command, folder)), command
        assert contents(here) == before
        path.unlink()
        if aside.exists():
            aside.rename(path)


def contents(folder: Path) -> dict[str, Any]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("page.html", ("report", "finished", "--out", "page.html")),
        (".tmp-page.html", ("report", "finished", "--out", "page.html")),
        (".tmp-records.json", ("compare", "comparison", "--records", "records.json")),
        ("fig.svg", ("report", "finished", "--figure", "scores", "--out", "fig.svg")),
        (".tmp-out", ("export", "finished", "out")),
    ],
)
def test_what_is_written_elsewhere_follows_no_planted_link(name: str, words: tuple[str, ...], here: Path) -> None:
    precious = here.parent / "precious"
    precious.write_text("mine")
    (here / name).symlink_to(precious)
    invoke(*words)
    assert precious.read_text() == "mine"
    assert (here / words[-1]).exists()
    assert not (here / words[-1]).is_symlink()


def test_a_result_is_not_kept_behind_a_link(here: Path) -> None:
    (here / "elsewhere").mkdir()
    (here / "finished/analysis").symlink_to(here / "elsewhere")
    with pytest.raises(fm.StoreError, match="analysis is a link"):
        save_result("finished", "curve", samples.saved_results()[0])
    assert os.listdir(here / "elsewhere") == []


def test_one_bad_folder_does_not_hide_the_others(here: Path) -> None:
    os.mkfifo(here / "finished" / "lock.fifo")
    rows = {row["name"]: row for row in list_saved_runs(here)}
    assert rows["finished"]["status"] == "unreadable"
    assert "lock.fifo is a pipe" in rows["finished"]["changed"]
    assert rows["interrupted"]["status"] == "interrupted"


HOSTILE = "\x1b[2J\x9b31m</script><b>|`*_[x](y)\x07"


def renamed(value: Any) -> Any:
    """The data with every name of a task or branch a hostile one, and a hostile note."""
    if isinstance(value, dict):
        return {renamed(key): renamed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item) for item in value]
    return HOSTILE + value if value in ("tgt", "aux", "alone", "joint", "accuracy") else value


def test_names_and_notes_of_a_received_folder_are_obeyed_by_nobody(here: Path) -> None:
    for folder, names in (
        ("finished", ("result.json", "config.json")),
        ("comparison", ("plan.json", "tgt/ew-seed0.json")),
    ):
        for name in names:
            data = renamed(read_object(here / folder / name))
            for key in ("result", "outcome"):
                if key in data:
                    data[key]["notes"] = [f"=1+1 {HOSTILE}\nimport os"]
            write_object(here / folder / name, data)
    for words in (["show", "finished"], ["runs", "."], ["compare", "comparison"], ["show", "finished", "--json"]):
        shown = invoke(*words)
        assert r"\u001b[2J" in shown.stdout
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown.stdout + shown.stderr)
    invoke("export", "finished", "out")
    card = (here / "out/README.md").read_text()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", card)
    assert r"\<b>\|\`\*\_[x\](y)" in card
    assert "\nimport os" not in card
    for name in ("comparison.md", "comparison.csv", "comparison.tex"):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", (here / "comparison" / name).read_text()), name
