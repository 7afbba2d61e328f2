"""Benchmarks run, their page is what their results say, and nothing here looks at a clock."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

FOLDER = ROOT / "benchmarks"
SHARED = {"harness", "nets", "page", "run"}


def bench(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *words], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def shared(monkeypatch):
    """Import what the scripts share as they do, and forget it afterwards: its names are common ones."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    import harness
    import page

    yield harness, page
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == FOLDER:
            del sys.modules[name]


def test_the_pages_are_what_the_committed_results_say():
    done = bench("page", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_script_with_an_entry_is_a_benchmark_of_the_runner(shared):
    _, page = shared
    scripts = {}
    for path in FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        scripts[path.stem] = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    entries = {name for name, has_main in scripts.items() if has_main and name != "run"}
    assert entries <= set(page.ORDER)
    assert not entries & SHARED


def test_results_hold_no_paths_and_no_dates():
    for path in (FOLDER / "results").glob("*.json"):
        text = path.read_text("utf-8")
        assert "/home" not in text
        assert "/tmp" not in text
        assert not {"date", "time", "host", "hostname", "user"} & set(json.loads(text))


def test_an_unknown_name_lists_the_benchmarks():
    done = bench("metods")
    assert done.returncode == 2
    assert "Did you mean 'methods'?" in done.stderr
    assert "methods" in done.stdout


def test_a_result_nobody_explains_is_shown_as_it_is(shared, tmp_path, monkeypatch):
    _, page = shared
    monkeypatch.setattr(page, "ORDER", ("bare", "not_run_yet"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "bare.py").write_text('"""A benchmark without section."""\n')
    whole = {
        "machine": {"python": "3", "torch": "2", "cpu": "c", "machine": "m"},
        "results": {"a": {"b": {"median": 1.0, "low": 0.5, "high": 2.0}, "c": 3}},
    }
    (tmp_path / "bare.json").write_text(json.dumps(whole))
    text = page.render(tmp_path)
    assert "| a · b | 1.00 (0.50–2.00) |" in text
    assert "| a · c | 3 |" in text
    assert "not_run_yet" not in text


def test_the_first_page_is_one_table_of_answers_that_fits_a_screen_and_names_missed_goals(shared, monkeypatch):
    _, page = shared
    for name in page.ORDER:  # folders of tests have some of these names, too
        monkeypatch.delitem(sys.modules, name, raising=False)
    text = page.summarise(FOLDER / "results")
    assert len(text.splitlines()) < 30
    assert text.count("| --- |") == 1
    _, sections = page.read(FOLDER / "results")
    for section in sections.values():
        assert section.answers or section.title == "The way through the files", "a user asks nothing of it"
        for goal in section.goals:
            assert (f"{goal.what}: {goal.cells()[1]}" in text) == (not goal.is_met)
    details = page.render(FOLDER / "results")
    for anchor in re.findall(r"performance-details\.md#([\w-]+)", text):
        assert anchor in {page._anchor(section.title) for section in sections.values()}
    assert all(f"## {section.title}" in details for section in sections.values())


def test_a_missed_goal_is_said_plainly(shared):
    _, page = shared
    assert page.Goal("speed", 1.4, 1.5, at_least=True, unit="×").cells() == ["speed", "≥ 1.4×", "1.50×", "met"]
    assert page.Goal("overhead", 6, 7.04, unit="%", digits=1).cells() == ["overhead", "≤ 6%", "7.0%", "**not met**"]
    assert page.Goal("overhead", 6, 6.004, unit="%").is_met  # as printed
    assert not page.Goal("nothing", 6, float("nan")).is_met


def test_ratios_are_between_neighbours(shared):
    harness, _ = shared
    calls = []
    names = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    ratios = harness.interleave(names, "a", rounds=3)
    assert "".join(calls) == "abababab"
    assert (ratios["a"].low, ratios["a"].median, ratios["a"].high) == (1.0, 1.0, 1.0)


def test_a_quick_run_saves_apart_and_a_result_names_its_command(shared, tmp_path, monkeypatch):
    harness, _ = shared
    assert harness.begin(harness.parser(None), ["--quick"]).out == harness.QUICK
    assert harness.begin(harness.parser(None), []).out == harness.RESULTS
    monkeypatch.setattr(sys, "argv", ["/some/where/memory.py", "--branches", "2", "--out", str(tmp_path)])
    whole = json.loads(harness.save("memory", {"x": harness.Ratio(1, 1, 1)}, tmp_path).read_text("utf-8"))
    assert whole["command"] == "./run bench memory --branches 2"
    assert whole["results"]["x"]["median"] == 1
    assert {"python", "torch", "cpu", "cores", "threads", "load"} <= set(whole["machine"])


def test_advice_is_scored_beside_the_probes_and_only_where_it_was_asked(shared):
    import advice

    def pair(gain, predicted, **more):
        said = {"predicted": predicted, "predicted by seed": [predicted], "effect": gain}
        return {"gain": gain, "low": gain - 0.01, "high": gain + 0.01, **said, **more}

    asked = {"good": pair(0.1, False, advised="use"), "clash": pair(-0.1, True, advised="no difference shown")}
    asked["bad"] = pair(-0.2, True, advised="drop")
    results = {"digits": {"share": 0.1, "pairs": {"clash": pair(-0.2, True)}}, "PACS": {"share": 0.1, "pairs": asked}}
    summary = advice.summary(results)
    assert (summary["decided"], summary["advised"]) == (4, 3)
    assert (summary["f1 decided"], summary["f1 advised"]) == (1, pytest.approx(2 / 3))
    written = advice.section(results)
    assert [row[-1] for row in written.tables[0].rows] == ["–", "use", "no difference shown", "drop"]
    text = " ".join(written.notes)
    assert "all that hurts is one task, `clash`" in text
    assert "F1 over the 3 of the scored pairs where it was asked is 0.67" in text


def test_the_twin_of_the_whole_run_does_the_same_training():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(FOLDER / "twin.py"), "--check"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "weights differ by" in done.stdout


def test_a_merge_and_a_step_lead_through_few_files(shared):
    import hops

    results = hops.count_run()
    for name, (files, most) in hops.GOALS.items():
        assert len(results[name]["files"]) <= files, results[name]["files"]
        assert most is None or results[name]["hops"] <= most
