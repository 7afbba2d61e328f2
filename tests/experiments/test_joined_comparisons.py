"""Several comparisons as one: Δ_m over the targets of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from command_line import error_of, invoke
from forkmerge.experiments.comparison import plan_comparison, run_comparison
from forkmerge.experiments.joined_comparisons import read_joined
from forkmerge.report.comparison_tables import summary_from

PROBLEM = "compare_problem:recipe"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> list[Path]:
    """Two comparisons, of other targets, that share two methods."""
    out = tmp_path_factory.mktemp("joined")
    for name, target, methods in (("one", "tgt", "ew,forkmerge"), ("two", "aux", "ew,uw")):
        run_comparison(plan_comparison(PROBLEM, methods=methods, targets=target, seeds=2), out / f"compare-{name}")
    return [out / "compare-one", out / "compare-two"]


def test_the_average_is_that_of_both(folders: list[Path]) -> None:
    shown = json.loads(invoke("compare", folders[0], "--with", folders[1], "--json").stdout)
    assert list(shown["targets"]) == ["one", "two"]
    assert [standing["method"] for standing in shown["overall"]] == ["stl", "ew"]  # those that both have
    alone = [summary_from(folder) for folder in folders]
    changes = [next(s.change.mean for s in summary.overall if s.method == "ew") for summary in alone]
    together = next(s for s in shown["overall"] if s["method"] == "ew")
    assert together["change"]["mean"] == pytest.approx(sum(changes) / 2)
    assert not [path for folder in folders for path in folder.glob("comparison.*")], "nothing is written"


def test_the_records_of_both_make_the_same_tables(folders: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "both.json"
    printed = invoke("compare", folders[0], "--with", folders[1], "--records", file).stdout
    assert "target: one" in printed
    summary = summary_from(file)
    assert list(summary.targets) == ["one", "two"]


def test_a_comparison_of_several_targets_keeps_their_names(folders: list[Path], tmp_path: Path) -> None:
    run_comparison(plan_comparison(PROBLEM, methods="ew", targets="all", seeds=1), tmp_path / "wide")
    plan, results = read_joined([folders[0], tmp_path / "wide"])
    assert plan["targets"] == ["one", "wide tgt", "wide aux"]
    assert {result.target for result in results} == set(plan["targets"])


def test_comparisons_that_cannot_be_told_apart_or_averaged_are_refused(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(fm.ConfigError, match="two of the comparisons are called 'one'"):
        read_joined([folders[0], folders[0]])
    plan = plan_comparison(PROBLEM, methods="ew", targets="tgt", seeds=1, equal_labels=True)
    run_comparison(plan, tmp_path / "equal")
    with pytest.raises(fm.ConfigError, match="only some of the comparisons train on equal labels"):
        read_joined([folders[0], tmp_path / "equal"])
    said = error_of("compare", PROBLEM, "--with", folders[0])
    assert "--with shows earlier comparisons together, and compare_problem:recipe is none" in said
