"""`forkmerge mix`: from corpora on disk to a model and a table, or to what that would cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

from command_line import error_of, invoke
from text_corpora import write_causal, write_encoder, write_lines

SMALL = ("--model", "model", "--steps", 2, "--length", 16, "--batch-size", 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_lines(tmp_path / "target.jsonl", "da", 12)
    write_lines(tmp_path / "near.jsonl", "nb", 12)
    write_lines(tmp_path / "far.jsonl", "ru", 6, first=50)
    write_causal(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_ends_with_scores_relevance_the_mixture_and_the_model(folder: Path) -> None:
    words = ("mix", "target.jsonl", "--with", "near.jsonl", *SMALL, "--id", "page", "--no-baselines", "--workers", 1)
    words = (*words, "--freeze-a", "--base-model", "org/tiny")
    result = invoke(*words)
    for text in ("bits per byte on test text", "target only", "relevance (λ)", "the mixture over time", "round"):
        assert text in result.stdout
    assert "runs/mix-target/export/model" in result.stdout.replace("\n", "")
    assert (folder / "runs/mix-target/export/model/model.safetensors").is_file()
    assert 'base_model: "org/tiny"' in (folder / "runs/mix-target/export/model/README.md").read_text()
    assert "with the same id" in result.stderr
    assert "left out" in result.stderr
    again = json.loads(invoke(*words, "--json").stdout)
    assert again["scores"].keys() == {"mixture", "target only"}
    invoke("report", "runs/mix-target")
    page = (folder / "runs/mix-target/report.html").read_text()
    for text in ("what each corpus was worth", "the mixture over time", "with the same id", "export/model"):
        assert text in page
    assert not any(word in page for word in ("STL", "ForkMerge-aux"))


def test_a_dry_run_says_the_cost_and_trains_nothing(folder: Path) -> None:
    result = invoke("mix", "target.jsonl", "--with", "near.jsonl", "far.jsonl", *SMALL, "--dry-run")
    for label in ("target only", "equal weights", "with near", "with far", "mixture"):
        assert label in result.stdout
    assert not (folder / "runs").exists()


def test_an_encoder_is_trained_whole_and_refitted_and_what_is_contaminated_can_be_kept(folder: Path) -> None:
    write_encoder(folder / "encoder")
    words = ("mix", "target.jsonl", "--with", "near.jsonl", *SMALL[2:], "--model", "encoder", "--full", "--refit")
    words = (*words, "--id", "page", "--contamination", "report", "--no-baselines", "--workers", 1)
    told = json.loads(invoke(*words, "--json").stdout)
    assert (told["metric"], set(told["scores"])) == ("bits_per_token", {"mixture", "target only"})
    near = {each["corpus"]: each for each in told["contamination"]}["near"]
    assert len(near["same_id"]) >= 2
    assert "kept, as --contamination report asks for" in invoke(*words, "--dry-run").stderr
    model = AutoModelForMaskedLM.from_pretrained(told["model"])
    before = AutoModelForMaskedLM.from_pretrained(folder / "encoder")
    assert all((a != b).any() for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_the_target_comes_first(folder: Path) -> None:
    text = error_of("mix", "--with", "near.jsonl", "far.jsonl", "target.jsonl", *SMALL)
    assert text.startswith("the target comes first: write ")
    assert "one other corpus" in error_of("mix", "target.jsonl", *SMALL)
