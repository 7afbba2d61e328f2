"""The demo: a comparison like any other, its figure and its results."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import forkmerge as fm
from command_line import invoke
from forkmerge.cli import demo
from forkmerge.datasets import digits
from forkmerge.experiments.run_results import RunResult, read_plan

QUICK = 8  # steps


def test_missing_packages_are_named_at_once_with_what_to_type(monkeypatch, tmp_path):
    for module in ("mlxtend", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(fm.ForkMergeError) as caught:
        demo.run_demo(seeds=1, workers=1, out=tmp_path / "out", as_json=False)
    assert str(caught.value) == "the demo needs mlxtend and matplotlib: type pip install 'forkmerge[demo]'."
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["seeds", "workers", "steps"])
def test_counts_must_be_positive(option):
    with pytest.raises(fm.ConfigError, match=f"{option} must be a positive integer, got 0"):
        demo.run_demo(**{option: 0})


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(fm.StoreError, match=r"cannot make the folder .*file"):
        demo.run_demo(out=tmp_path / "file")


def test_the_comparison_is_of_the_recipes_tasks_with_equal_labels():
    comparison = demo.demo_comparison(seeds=2)
    problem = comparison.recipe.problem
    assert (demo.TARGET, *demo.AUXILIARIES) == problem.tasks
    assert (comparison.recipe.steps, comparison.seeds) == (digits.STEPS, (0, 1))
    weights = {}
    for method in comparison.methods:
        algorithm = method.algorithm(comparison.recipe, refit=comparison.equal_labels)
        assert (algorithm.interval, algorithm.refit) == (digits.STEPS / demo.ROUNDS, True)
        weights[method.label] = [mixture.task_weights for mixture in algorithm.settings(problem).branches(problem, {})]
    assert list(weights) == list(demo.METHODS)
    assert weights[demo.SINGLE] == [{"digits": 1.0}]
    assert weights["with clash"] == [{"digits": 1.0, "clash": 1.0}]
    assert weights["with all, equal weights"] == [dict.fromkeys(problem.tasks, 1.0)]
    assert len(weights[demo.MIXED]) == 2
    assert len(weights[demo.SPLIT]) == 4


def test_a_demo_prints_its_tables_and_writes_its_files_whatever_the_number_of_processes(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (first / "mine.txt").write_text("kept")
    assert demo.run_demo(seeds=2, workers=1, out=first, as_json=False, steps=QUICK) == 0
    printed = capsys.readouterr()
    for name in demo.METHODS:
        assert name in printed.out
    assert "made to" in printed.out
    assert "14/14 runs" in printed.err
    assert (first / demo.FIGURE).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in first.iterdir()) == [demo.FIGURE, demo.COMPARISON, "mine.txt", demo.RESULTS]

    assert demo.run_demo(seeds=2, workers=2, out=second, as_json=True, steps=QUICK) == 0
    results = [json.loads((first / demo.RESULTS).read_text()), json.loads(capsys.readouterr().out)]
    assert results[1] == json.loads((second / demo.RESULTS).read_text())
    for result, workers in zip(results, (1, 2), strict=True):
        assert result.pop("workers") == workers
        assert result.pop("seconds") > 0
        assert (result["labels"], result["test_examples"], result["steps"]) == (60, 1737, QUICK)
        result.pop("files")
    assert results[0] == results[1]


def test_an_interrupted_demo_is_continued_and_a_finished_one_begun_anew(tmp_path, monkeypatch):
    finish = demo.results_from
    monkeypatch.setattr(demo, "results_from", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo(seeds=1, workers=1, out=tmp_path, steps=QUICK)
    monkeypatch.setattr(demo, "results_from", finish)
    records = sorted((tmp_path / demo.COMPARISON).glob("*/*.json"))
    kept = {path: path.stat().st_mtime_ns for path in records}
    assert len(kept) == 7
    demo.run_demo(seeds=1, workers=1, out=tmp_path, steps=QUICK)
    assert {path: path.stat().st_mtime_ns for path in records} == kept
    demo.run_demo(seeds=1, workers=1, out=tmp_path, steps=QUICK)
    assert not {path.stat().st_mtime_ns for path in records} & set(kept.values())
    assert read_plan(tmp_path / demo.COMPARISON)["equal_labels"] is True


def records(accuracies: dict[str, list[float]]) -> list[RunResult]:
    """Records of all methods; those that are not named are as good as single-task."""
    rounds = [{"end": 2, "score": 0.5, "coefficients": {"alone": 0.5, "mnist": 0.5}}]
    return [
        RunResult(
            *(word, name, "digits", seed, "final", {}, "folder"),
            metrics={"accuracy": accuracies.get(name, accuracies[demo.SINGLE])[seed]},
            rounds=rounds if name in (demo.MIXED, demo.SPLIT) else [{"end": 2, "score": 0.5}],
            notes=["odd"] if seed == 0 else [],
        )
        for seed in (2, 0, 1)
        for name, word in demo.METHODS.items()
    ]


def test_the_results_are_paired_by_seed():
    comparison = demo.demo_comparison(seeds=3)
    results = demo.results_from(comparison, records({demo.SINGLE: [0.8, 0.9, 0.7], demo.SPLIT: [0.9, 0.9, 0.6]}))
    split = results["methods"][demo.SPLIT]
    assert results["seeds"] == [0, 1, 2]
    assert split["accuracy"] == [0.9, 0.9, 0.6]
    assert (split["wins"], split["ties"], split["losses"]) == (1, 1, 1)
    assert split["gain"] == pytest.approx(0)
    assert split["gain_std"] == pytest.approx(0.1)
    assert split["coefficients"] == [[{"alone": 0.5, "mnist": 0.5}]] * 3
    assert split["mean_coefficients"] == [{"alone": 0.5, "mnist": 0.5}]
    assert split["notes"] == ["odd"]
    assert results["methods"][demo.SINGLE]["mean_coefficients"] == []


def test_seeds_and_methods_of_an_earlier_demo_are_left_out_and_failures_named():
    comparison, runs = demo.demo_comparison(seeds=1), records({demo.SINGLE: [0.8, 0.9, 0.7]})
    other = replace(runs[0], label="EW[lr=1]", error="broke")
    failed = replace(runs[0], error="broke")  # seed 2
    assert demo.results_from(comparison, [*runs, other])["methods"][demo.SINGLE]["accuracy"] == [0.8]
    with pytest.raises(fm.ProblemError, match="the demo's run of 'single-task' with seed 2 failed: broke"):
        demo.results_from(demo.demo_comparison(seeds=3), [failed, *runs[1:]])


def test_an_interruption_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(digits, "classification_loss", interrupted)
    shown = invoke("demo", "--seeds", 1, "--workers", 1, "--out", tmp_path / "d", code=130)
    assert f"continue with: forkmerge demo --seeds 1 --workers 1 --out {tmp_path / 'd'}\n" in shown.stderr
    assert not Path(tmp_path / "d" / demo.RESULTS).exists()
