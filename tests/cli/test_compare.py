"""`forkmerge compare` and `forkmerge methods` as a user meets them, a SIGKILL included."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import compare_problem
import forkmerge as fm
from command_line import error_of, invoke
from forkmerge.cli.commands import app
from paths import TESTS
from problems import Stopped

PROBLEM = "compare_problem:recipe"


def numbers(data: dict[str, Any]) -> dict[str, Any]:
    """All numbers of comparison.json but times and paths."""
    kept = {key: value for key, value in data.items() if key != "files"}
    kept["costs"] = {word: {**cost, "time": None, "tuning": None} for word, cost in data["costs"].items()}
    return kept


def test_tables_are_printed_and_written(tmp_path):
    out = tmp_path / "out"
    found = invoke("compare", PROBLEM, "--methods", "ew,forkmerge", "--seeds", 2, "--workers", 1, "--out", out)
    assert "target: tgt" in found.stdout
    assert "Δ_m over all targets, and costs" in found.stdout
    assert "read once per run, after its fit; every choice was made on validation data" in found.stdout
    assert "paired t, 95%" in found.stdout
    assert "6 runs" in found.stderr
    assert "EW  tgt  seed 0  test accuracy" in found.stderr
    for name in ("md", "csv", "tex", "json"):
        assert (out / f"comparison.{name}").stat().st_size > 100
    again = invoke("compare", out)
    assert again.stdout == found.stdout


@pytest.mark.parametrize(
    ("words", "option"),
    [(("--seeds", 3), "--seeds"), (("--no-equal-labels",), "--equal-labels"), (("--set", "steps=5"), "--set")],
)
def test_an_earlier_comparison_is_only_shown(words, option, tmp_path):
    assert f"to change {option}, give the problem and --out {tmp_path}." in error_of("compare", tmp_path, *words)


def test_json_is_all_there_is_on_standard_output(tmp_path):
    options = ("--methods", "ew", "--seeds", 1, "--workers", 1, "--out", tmp_path / "out")
    found = invoke("compare", PROBLEM, *options, "--targets", "all", "--set", "steps=4", "--json")
    data = json.loads(found.stdout)
    assert set(data["targets"]) == {"tgt", "aux"}
    assert data["plan"]["settings"]["steps"] == 4
    assert data["split"] == "test"
    assert data == {**json.loads((tmp_path / "out" / "comparison.json").read_text())}


def test_tuned_comparisons_say_what_was_chosen(tmp_path):
    options = ("--methods", "forkmerge", "--seeds", 1, "--workers", 1, "--out", tmp_path / "out")
    found = invoke("compare", PROBLEM, *options, "--tune", "lr=0.001,0.3", "--tune", "interval=2,3")
    assert "chosen on validation:" in found.stdout
    assert "STL lr 0.3" in found.stdout
    assert "ForkMerge, lr 0.001, interval 2  tgt  seed 0  validation accuracy" in found.stderr


def test_failures_are_told_and_make_the_command_fail(tmp_path):
    options = ("--methods", "ew", "--seeds", 2, "--workers", 1, "--out", tmp_path / "out")
    found = invoke("compare", PROBLEM, *options, "--set", "arguments.broken=1", code=1)
    assert "failed: EW on 'tgt', seed 1: RuntimeError: the odd task broke" in found.stdout
    assert "1 run failed; the same command tries again." in found.stderr


def test_an_interruption_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_problem, "losses", interrupted)
    options = ("--methods", "ew", "--seeds", 1, "--workers", 1, "--out", tmp_path / "out")
    found = invoke("compare", PROBLEM, *options, code=130)
    typed = f"compare {PROBLEM} --methods ew --seeds 1 --workers 1 --out {tmp_path / 'out'}"
    assert f"interrupted. What has ended is kept; continue with: forkmerge {typed}\n" in found.stderr


def test_the_default_folder_is_named_after_the_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("compare", PROBLEM, "--methods", "stl", "--seeds", 1, "--workers", 1)
    assert (tmp_path / "runs" / "compare-compare_problem" / "comparison.md").is_file()


def test_errors_are_the_librarys_own(tmp_path):
    assert "Did you mean 'pcgrad'" in error_of("compare", PROBLEM, "--methods", "pcgrd", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def command(out: Path) -> list[str]:
    options = ["--methods", "ew,forkmerge", "--seeds", "2", "--workers", "2", "--json", "--set", "steps=60"]
    tuning = ["--tune", "interval=15,30", "--set", "algorithm.interval=15"]
    return [sys.executable, "-m", "forkmerge.cli", "compare", PROBLEM, *options, *tuning, "--out", str(out)]


def test_killed_outright_and_run_again_it_gives_the_same_tables(tmp_path):
    folder = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    process = subprocess.Popen(command(folder), **quiet)
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*/*.json"))) < 2 and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: path.read_bytes() for path in folder.glob("*/[!.]*.json")}
    again = subprocess.run(command(folder), capture_output=True, env=environment, check=True)
    assert all(path.read_bytes() == data for path, data in kept.items())
    whole = invoke(*command(tmp_path / "whole")[3:], "--workers", 1)
    assert numbers(json.loads(again.stdout)) == numbers(json.loads(whole.stdout))


def test_stopped_in_a_run_it_goes_on_from_the_checkpoint(tmp_path):
    options = ("--methods", "forkmerge", "--seeds", 1, "--workers", 1, "--json", "--out", tmp_path / "out")
    compare_problem.stop_at.append((0, 4))
    with pytest.raises(Stopped):
        CliRunner().invoke(app, [str(each) for each in ("compare", PROBLEM, *options)], standalone_mode=False)
    found = invoke("compare", PROBLEM, *options)
    whole = invoke("compare", PROBLEM, *options[:-1], tmp_path / "whole")
    assert numbers(json.loads(found.stdout)) == numbers(json.loads(whole.stdout))


TABLE = """
recipe = "compare_problem:recipe"
steps = 4

[compare]
methods = ["ew[lr=0.01]", "ew[lr=0.3], forkmerge"]
targets = ["tgt", "aux"]
seeds = 2
tune = {interval = [1, 2]}
workers = 1
"""


def test_a_file_says_what_is_compared_and_options_override_it(tmp_path):
    file, out = tmp_path / "small.toml", tmp_path / "out"
    file.write_text(TABLE)
    found = json.loads(invoke("compare", file, "--out", out, "--json").stdout)
    assert [method["label"] for method in found["plan"]["methods"]] == ["STL", "EW[lr=0.01]", "EW[lr=0.3]", "ForkMerge"]
    assert "compare" not in found["plan"]["settings"]
    plan = {key: found["plan"][key] for key in ("targets", "seeds", "tune")}
    assert plan == {"targets": ["tgt", "aux"], "seeds": [0, 1], "tune": {"interval": [1, 2]}}
    first, second = (standing["change"]["mean"] for standing in found["overall"][1:3])
    assert first != second, "the learning rates of the words were not used"
    assert (
        json.loads(invoke("compare", file, "--out", out, "--seeds", 1, "--json").stdout)["overall"] == found["overall"]
    )
    less = invoke(
        "compare", file, "--out", tmp_path / "b", "--methods", "stl", "--targets", "aux", "--tune", "lr=1", "--json"
    )
    assert [json.loads(less.stdout)["plan"][key] for key in ("targets", "tune")] == [["aux"], {"lr": [1]}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("method = 'stl'", r"\[compare\]: unknown key 'method'. Did you mean 'methods'"),
        ("methods = 5", r"\[compare\] methods must be a string or a list of strings, got 5"),
        ("seeds = 0", "at least one seed"),
        ("tune = {lr = 0.1}", "--tune lr has no values"),
        ("tune_seeds = 7", "tune_seeds must be from 1 to the number of seeds, 5, got 7"),
        ("equal_labels = 'yes'", "equal_labels must be true or false"),
        ("workers = true", "workers must be a positive integer"),
    ],
)
def test_what_a_table_cannot_say_is_refused(line, message, tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(f'recipe = "{PROBLEM}"\n[compare]\n{line}\n')
    assert re.search(message, error_of("compare", file, "--out", tmp_path / "out"))
    if "unknown key" in message:
        with pytest.raises(fm.ConfigError, match=message):
            fm.load_recipe(file)


def test_a_dry_run_says_what_would_run_and_writes_nothing(tmp_path):
    file, out = tmp_path / "small.toml", tmp_path / "out"
    file.write_text(TABLE + "tune_seeds = 2\n")
    found = json.loads(invoke("compare", file, "--out", out, "--dry-run", "--workers", 2, "--json").stdout)
    assert not out.exists()
    by_word = {method["method"]: method for method in found["methods"]}
    assert list(by_word) == ["stl", "ew[lr=0.01]", "ew[lr=0.3]", "forkmerge"]
    assert {word: method["steps"] for word, method in by_word.items()} == {
        "stl": 2 * 2 * 4,
        "ew[lr=0.01]": 2 * 2 * 4,
        "ew[lr=0.3]": 2 * 2 * 4,
        # Two targets, two seeds, two branches; as much again for each of the two intervals that tuning tries.
        "forkmerge": 2 * 2 * 4 * 2 * (1 + 2),
    }
    assert (by_word["forkmerge"]["runs"], by_word["forkmerge"]["tuning_runs"], found["runs"]) == (4, 8, 24)
    assert found["steps"] == sum(method["steps"] for method in found["methods"])
    assert by_word["forkmerge"]["memory"] > by_word["stl"]["memory"] > 0
    assert found["memory"] == 2 * by_word["forkmerge"]["memory"]
    assert found["seconds"] > 0
    shown = invoke("compare", file, "--out", out, "--dry-run").stdout
    assert "4 methods × 2 targets × 2 seeds: 24 runs, 144 training steps" in " ".join(shown.split())


def test_a_dry_run_refuses_what_a_run_would_refuse(tmp_path):
    options = ("--methods", "forkmerge[search=binary,mixtures=per_auxiliary]", "--dry-run", "--out", tmp_path / "out")
    error = error_of("compare", PROBLEM, *options)
    assert re.search(r"ForkMerge\[mixtures=per_auxiliary,search=binary\] on 'tgt': .*branches", error)


def test_a_dry_run_counts_the_pretraining_and_looks_whether_it_fits(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "small.toml"
    table = f'{TABLE}[pretrain]\nrecipe = "{PROBLEM}"\nsteps = 3\npart = "body"\n'
    file.write_text(table)
    found = json.loads(invoke("compare", file, "--dry-run", "--json").stdout)["pretraining"]
    assert (found["recipe"], found["steps"], found["is_done"]) == (PROBLEM, 3, False)
    assert found["seconds"] > 0
    invoke("compare", file, "--methods", "forkmerge", "--seeds", 1, "--targets", "tgt", "--out", tmp_path / "out")
    again = json.loads(invoke("compare", file, "--dry-run", "--json").stdout)["pretraining"]
    assert (again["is_done"], again["seconds"]) == (True, 0.0)
    assert "3 steps, is done already." in invoke("compare", file, "--dry-run").stdout
    file.write_text(table.replace('part = "body"', 'part = "bodi"'))
    assert "Did you mean 'body'" in error_of("compare", file, "--dry-run")
