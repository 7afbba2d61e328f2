"""Commands whose standard output or error is closed or full: no traceback, the work is done, the exit code says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from _asserts import assert_same_bits
from command_line import TINY
from forkmerge.engine.storage.run_folder import status
from paths import ROOT

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")

LOST, BROKEN = 74, 141


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(TINY)
    return tmp_path


def call(folder: Path, words: str, redirections: str) -> tuple[int, str, str]:
    """The exit code of a command, and what came through of its output; `3` is a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "FORKMERGE_COMMAND": "forkmerge",
    }
    shell = ["bash", "-c", f'exec "$@" {redirections.replace("3", str(writer))}', "bash"]
    command = [*shell, sys.executable, "-m", "forkmerge.cli", *words.split()]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, pass_fds=[writer], capture_output=True, text=True, timeout=300
        )
    finally:
        os.close(writer)
    return done.returncode, done.stdout, done.stderr


def test_runs_are_done_shown_and_reported_whatever_becomes_of_the_output(folder: Path) -> None:
    """One folder after the other: a run whose reader has gone, in two processes whose code prints, is the run."""
    assert call(folder, "run tiny:recipe --out a --workers 2", ">&3 2>/dev/full")[0] == BROKEN
    code, printed, _ = call(folder, "run tiny:recipe --out b", "2>&3")  # progress alone is lost: all is well
    assert code == 0
    assert "kept in b" in printed
    assert status(folder / "a") == status(folder / "b") == "finished"
    assert_same_bits(load_file(folder / "a/model.safetensors"), load_file(folder / "b/model.safetensors"))
    assert call(folder, "show a", ">&3") == (BROKEN, "", "")
    message = "error: standard output could not be written: No space left on device. The command itself is done.\n"
    assert call(folder, "report a", ">/dev/full") == (LOST, "", message)
    assert "<html" in (folder / "a/report.html").read_text()
    code, printed, _ = call(folder, "show a --json", "2>&-")
    assert code == 0
    assert printed.startswith("{")


def test_a_comparison_is_made_with_everything_closed(folder: Path) -> None:
    words = "compare tiny:recipe --methods ew --seeds 1 --out c"
    assert call(folder, words, ">&- 2>&-")[0] == LOST
    assert (folder / "c/comparison.md").exists()
    runs = list((folder / "c").rglob("record.jsonl"))
    assert runs
    assert not [
        path for path in (folder / "c").rglob("*") if path.is_file() and b"building the recipe" in path.read_bytes()
    ]


def test_a_diagnosis_is_made_with_a_full_disk_for_its_output(folder: Path) -> None:
    code, _, shown = call(folder, "diagnose tiny:recipe --budget 10s --out d", ">/dev/full")
    assert code == LOST
    assert "Traceback" not in shown
    assert (folder / "d/diagnosis.json").exists()


def test_an_error_keeps_its_own_exit_code(folder: Path) -> None:
    assert call(folder, "run tiny:nothing", ">&3 2>&-")[0] == 2
