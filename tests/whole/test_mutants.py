"""The page of mutants that survive is complete: every package, nine in ten killed, a reason for each survivor."""

from __future__ import annotations

import re

import pytest

import mutants
from paths import ROOT


@pytest.mark.parametrize("package", mutants.PACKAGES)
def test_nine_in_ten_mutants_are_killed_and_the_others_explained(package: str) -> None:
    assert (ROOT / "src/forkmerge" / package).is_dir() or (ROOT / f"src/forkmerge/{package}.py").is_file()
    assert (ROOT / mutants.PACKAGES[package]).exists()
    section = mutants.read_page()[0][package]
    killed, drawn, existing = map(int, re.search(r"^(\d+) of (\d+) .*; (\d+) exist", section, re.MULTILINE).groups())
    assert drawn == min(mutants.SAMPLE, existing)
    assert killed >= mutants.GOAL * drawn
    survivors = re.findall(r"^- (.*)\n  (.*)$", section, re.MULTILINE)
    assert len(survivors) == drawn - killed
    assert mutants.NOT_EXPLAINED not in section
    assert all(reason.endswith(".") for _, reason in survivors)
