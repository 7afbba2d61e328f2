"""Mixing ends with a model that transformers loads, and with what every corpus was worth."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from transformers import AutoModelForCausalLM

import forkmerge as fm
from forkmerge.algorithms.saved_run import read_run
from forkmerge.experiments.events import JobEnded
from forkmerge.experiments.mix import MixtureResult, find_mix, mix, plan_mix, read_mix
from forkmerge.experiments.run_results import read_run_results
from forkmerge.experiments.text_mixture import read_corpora_facts
from text_corpora import write_causal, write_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mix")
    write_lines(path / "target.jsonl", "da", 16)
    write_lines(path / "near.jsonl", "da", 16, first=50)
    write_lines(path / "far.jsonl", "ru", 8, first=100)
    write_causal(path / "model")
    return path


OPTIONS = {"steps": 4, "interval": 2, "length": 16, "batch_size": 2, "lr": 0.02}


@pytest.fixture(scope="module")
def result(folder: Path) -> MixtureResult:
    corpora = [folder / f"{name}.jsonl" for name in ("target", "near", "far")]
    return mix(corpora[0], corpora[1:], folder / "model", out=folder / "out", seeds=2, **OPTIONS)


def test_everything_is_compared_at_equal_steps(result: MixtureResult) -> None:
    assert set(result.scores) == {"mixture", "target only", "equal weights", "with near", "with far"}
    assert all(set(scores) == {0, 1} for scores in result.scores.values())
    assert result.steps == {**dict.fromkeys(result.scores, 4), "mixture": 12}
    assert (result.metric, result.split) == ("bits_per_byte", "test")
    ours, theirs = result.scores["mixture"], result.scores["target only"]
    assert result.gains["target only"].mean == pytest.approx(sum(theirs[s] - ours[s] for s in (0, 1)) / 2)


def test_the_best_single_corpus_is_chosen_on_validation(result: MixtureResult) -> None:
    runs = [run for run in read_run_results(result.folder) if run.method.startswith("with:")]
    means = {
        name: sum(r.validation["bits_per_byte"] for r in runs if r.method == f"with:{name}") for name in ("near", "far")
    }
    assert result.best_single == min(means, key=means.__getitem__)


def test_the_mixture_over_time_sums_to_one_and_relevance_is_its_mean(result: MixtureResult) -> None:
    assert len(result.mixture) == 2
    for shares in result.mixture:
        assert list(shares) == ["target", "near", "far"]
        assert sum(shares.values()) == pytest.approx(1)
    for name in ("near", "far"):
        mean, low, high = result.relevance[name]
        assert mean == pytest.approx(sum(2 * shares[name] for shares in result.mixture) / 2)
        assert low is None or low <= mean <= high


def test_prompts_and_notebooks_show_what_it_found(result: MixtureResult) -> None:
    lines = repr(result).splitlines()
    assert lines[0] == f"Mixture for 'target': bits per byte on test text, lower is better; model: {result.model_is}"
    shown = f"{fmean(result.scores['mixture'].values()):.4g}, 12 steps"
    assert [line.split(maxsplit=1) for line in lines[1:2]] == [["mixture", shown]]
    gain = f"{result.gains['equal weights'].mean:+.2g}"
    assert any("equal weights" in line and f"the mixture gains {gain}" in line for line in lines)
    assert [line.split()[0] for line in lines[-2:]] == ["1", "2"]
    assert "<table" in result._repr_html_()


def test_the_model_is_what_was_measured_with_its_adapters_merged(result: MixtureResult, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(result.model)
    assert not any("lora" in name for name, _ in model.named_parameters())
    plan = plan_mix(folder / "target.jsonl", [folder / "near.jsonl", folder / "far.jsonl"], folder / "model", **OPTIONS)
    measured = fm.measure(model, plan.recipe.problem.test["target"])["bits_per_byte"]
    assert measured == pytest.approx(result.scores[result.model_is][0], rel=1e-4)


def test_the_card_says_the_command_without_anybodys_folders(result: MixtureResult, folder: Path) -> None:
    command = "forkmerge mix target.jsonl --with near.jsonl far.jsonl --model model"
    told = json.loads((result.model / "card.json").read_text())["command"]
    assert told == f"{command} --steps 4 --interval 2 --length 16 --batch-size 2 --lr 0.02 --seeds 2"
    assert told in (result.model / "README.md").read_text()


def test_the_target_only_is_what_is_kept_where_it_validates_better(
    result: MixtureResult, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worse = [
        replace(run, validation={"bits_per_byte": 99.0}) if run.method.startswith("forkmerge") else run
        for run in read_run_results(result.folder)
    ]
    monkeypatch.setattr("forkmerge.experiments.mix.read_run_results", lambda path: worse)
    assert read_mix(result.folder).model_is == "target only"


def test_a_folder_goes_on_from_anywhere(result: MixtureResult, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = {path: os.stat(path).st_mtime_ns for path in result.folder.rglob("result.json")}
    words = ("target.jsonl", ["near.jsonl", "far.jsonl"], "model")
    again = mix(*words, out="out", seeds=2, **OPTIONS)
    assert again.scores == result.scores
    assert before == {path: os.stat(path).st_mtime_ns for path in result.folder.rglob("result.json")}
    with pytest.raises(fm.StoreError, match="compares with other settings"):
        mix(*words, out="out", **{**OPTIONS, "steps": 8})


def test_interrupted_it_goes_on_to_the_same_bits(folder: Path) -> None:
    words = (folder / "target.jsonl", [folder / "near.jsonl"], folder / "model")

    def kill(event: object) -> None:
        if isinstance(event, JobEnded):
            raise KeyboardInterrupt

    options = {**OPTIONS, "baselines": False}
    with pytest.raises(KeyboardInterrupt):
        mix(*words, out=folder / "killed", on_event=kill, **options)
    with pytest.raises(fm.StoreError, match="no mixture yet"):
        read_mix(folder / "killed")
    resumed, whole = (mix(*words, out=folder / name, **options) for name in ("killed", "whole"))
    assert resumed.scores == whole.scores
    assert (resumed.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()


def test_methods_are_called_by_what_they_train_on(result: MixtureResult) -> None:
    assert {run.label for run in read_run_results(result.folder)} == set(result.scores)


def test_what_was_found_can_be_read_again_without_writing_anything(result: MixtureResult) -> None:
    assert find_mix(result.folder) == result
    hidden = result.folder / "elsewhere"
    (result.folder / "export").rename(hidden)
    try:
        assert find_mix(result.folder) == replace(result, model=None)
        assert not (result.folder / "export").exists()
    finally:
        hidden.rename(result.folder / "export")


def test_the_folder_keeps_what_gave_the_test_away(result: MixtureResult) -> None:
    facts = read_corpora_facts(result.folder)
    assert facts is not None
    assert (facts.target, facts.contamination) == ("target", "drop")
    assert [corpus.name for corpus in facts.corpora] == ["target", "near", "far"]
    (result.folder / "corpora.json").write_text((result.folder / "corpora.json").read_text().replace("far", "fur"))
    with pytest.raises(fm.StoreError, match="checksum"):
        read_corpora_facts(result.folder)


def test_corpora_of_the_same_name_are_refused(folder: Path, tmp_path: Path) -> None:
    same = write_lines(tmp_path / "target.jsonl", "ru", 8)
    with pytest.raises(fm.ProblemError, match="names of their own"):
        plan_mix(folder / "target.jsonl", [same, folder / "near.jsonl"], folder / "model", **OPTIONS)


def test_without_baselines_only_the_target_alone_is_trained_beside_it(folder: Path) -> None:
    plan = plan_mix(folder / "target.jsonl", [folder / "near.jsonl"], folder / "model", baselines=False, **OPTIONS)
    assert {method.word for method in plan.methods} == {"stl", "forkmerge-aux"}


def test_a_refit_trains_on_validation_text_too(folder: Path) -> None:
    words = (folder / "target.jsonl", [folder / "near.jsonl"], folder / "model")
    result = mix(*words, out=folder / "refitted", baselines=False, refit=True, **{**OPTIONS, "steps": 2})
    runs = [read_run(result.folder / run.folder) for run in read_run_results(result.folder)]
    assert {run.final for run in runs} == {"refit"}
    trained = [sum(r.end - r.start for r in run.rounds for _ in r.branches) for run in runs]
    assert sorted(result.steps.values()) == sorted(trained)
    assert result.steps["target only"] == 4  # twice: a search, then the refit
    assert 6 <= result.steps["mixture"] <= 8  # what no merge took anything of is not trained again
    assert "--refit --no-baselines" in (result.model / "README.md").read_text()


def test_a_folder_without_results_says_so(tmp_path: Path) -> None:
    with pytest.raises(fm.StoreError, match="no mixture yet"):
        read_mix(tmp_path)
