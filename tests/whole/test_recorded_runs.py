"""Bits that were written down: runs of every algorithm, and folders of runs that were interrupted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from _asserts import assert_same_bits, facts
from paths import ROOT
from problems import fit
from recorded_runs import FILE, FOLDERS, INTERRUPTED, all_cases, checksum, machine

RECORDED: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
elsewhere = pytest.mark.skipif(
    RECORDED["machine"] != machine(),
    reason=f"recorded with {RECORDED['machine']}, and bits depend on it: this is {machine()}",
)


@elsewhere
@pytest.mark.parametrize("name", all_cases())
def test_a_run_ends_with_the_bits_that_were_recorded(name: str, tmp_path: Path) -> None:
    assert checksum(all_cases()[name](tmp_path)) == RECORDED["sha256"][name]


@pytest.mark.skipif("AVX512" not in machine()["cpu"], reason="only a newer processor can do as an older one does")
def test_on_a_newer_processor_the_bits_are_checked_with_the_instructions_they_were_recorded_with() -> None:
    older = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", __file__]
    checked = subprocess.run(command, env={**os.environ, **older}, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout[-3000:]
    assert "SKIPPED [1]" in checked.stdout, "all but this test itself"


def test_every_recorded_run_is_checked() -> None:
    assert set(RECORDED["sha256"]) == set(all_cases())


@pytest.mark.filterwarnings("ignore:resumed in another environment")
@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_folder_that_an_older_version_left_goes_on_to_the_end_it_would_have_had(name: str, tmp_path: Path) -> None:
    algorithm, options, _ = INTERRUPTED[name]
    folder = tmp_path / name
    shutil.copytree(FOLDERS / name, folder)
    resumed = fit(algorithm, folder=folder, resume=True, **options)
    whole = fit(algorithm, **options)
    if RECORDED["machine"] == machine():
        assert_same_bits(resumed, whole)
        notes = [note for note in resumed.notes if "another environment" not in note]
        assert {**facts(resumed), "notes": notes} == facts(whole)
    else:  # its first steps were taken elsewhere: the end is near, but not equal
        assert resumed.score == pytest.approx(whole.score, rel=0.05)
