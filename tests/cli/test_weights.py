"""Weights from the command line: those of a run are written elsewhere, those on disk are merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from command_line import error_of, invoke
from text_corpora import write_causal, write_lines

TRANSFORMERS_PROBLEM = """
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification
import forkmerge as fm


def data(seed):
    tokens = torch.randint(20, (16, 6), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, (tokens < 10).sum(1).gt(3).long())


def losses(model, batch, tasks, context):
    return {task: cross_entropy(model(batch[0]).logits, batch[1]) for task in tasks}


def predict(model, batch):
    return model(batch[0]).logits, batch[1]


def tiny(width):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(vocab_size=20, hidden_size=width, **sizes))


def recipe(width=8):
    streams = [fm.Stream(data(seed), losses, task, 8) for seed, task in enumerate(("reviews", "news"))]
    problem = fm.Problem("reviews", streams, fm.Evaluation(data(5), fm.accuracy, predict))
    return fm.Recipe(problem, lambda: tiny(width), fm.OptimizerOf("AdamW", lr=1e-2), 4, fm.ForkMerge(interval=2))
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"a": 0.0, "b": 1.0}.items():
        save_file({"w": torch.full((3,), value)}, f"{name}.safetensors")


def test_models_on_disk_are_merged_with_the_coefficients_typed() -> None:
    done = invoke("merge", "a.safetensors", "b.safetensors", "--coefficients", "0.75,0.25", "out.safetensors")
    assert done.stdout.strip() == "out.safetensors"
    assert load_file("out.safetensors")["w"].tolist() == [0.25] * 3
    done = invoke("merge", "a.safetensors", "b.safetensors", "out", "--coefficients", "0.5,0.5", "--json")
    assert json.loads(done.stdout) == {"files": ["out/model.safetensors"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--coefficients", "0.5,0.5", "a.safetensors", "out"], "2 coefficients, but 1 models to merge"),
        (["--coefficients", "0.5,0.5", "a.safetensors", "a.safetensors", "out"], "2 coefficients, but 1 models"),
        (["--coefficients", "0.5;0.5", "a.safetensors", "b.safetensors", "out"], "write numbers"),
        (["--coefficients", "0.5,0.6", "a.safetensors", "b.safetensors", "out"], "sum to 1"),
        (["--coefficients", "0.5,0.5", "a.safetensors", "b.safetensors", "a.safetensors"], "choose another name"),
    ],
)
def test_what_cannot_be_merged_is_one_error(words: list[str], message: str) -> None:
    before = Path("a.safetensors").read_bytes()
    done = invoke("merge", *words, code=2)
    assert message in " ".join(done.stderr.split())
    assert Path("a.safetensors").read_bytes() == before
    assert not Path("out").exists()


def test_a_run_of_a_mixture_is_exported_for_transformers_with_its_adapters_merged() -> None:
    for name, language in (("target", "da"), ("near", "nb")):
        write_lines(Path(f"{name}.jsonl"), language, 12)
    write_causal(Path("model"))
    options = ("--model", "model", "--steps", 2, "--length", 16, "--batch-size", 2, "--no-baselines", "--workers", 1)
    invoke("mix", "target.jsonl", "--with", "near.jsonl", *options, "--out", "mixed")
    Path("target.jsonl").unlink()  # the text is not needed any more
    run = "mixed/target/stl-seed0"
    invoke("export", run, "out", "--format", "hf")
    assert not any("lora" in name for name, _ in AutoModelForCausalLM.from_pretrained("out").named_parameters())
    invoke("export", run, "plain")
    for folder in ("out", "plain"):
        command = json.loads(Path(folder, "card.json").read_text())["command"]
        assert command.startswith("forkmerge mix target.jsonl --with near.jsonl --model model")


def test_a_run_of_a_comparison_is_exported_for_transformers_if_its_code_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("bert_problem.py").write_text(TRANSFORMERS_PROBLEM)
    words = ("compare", "bert_problem:recipe", "--set", "arguments.width=16", "--methods", "ew", "--seeds", 1)
    invoke(*words, "--workers", 1, "--out", "compared")
    run = "compared/reviews/ew-seed0"
    told = error_of("export", run, "out", "--format", "hf")
    assert "compared/plan.json says how its model is made" in told
    assert "run bert_problem:recipe with the arguments {'width': 16}" in told
    assert "add --trust" in told
    invoke("export", run, "out", "--format", "hf", "--trust")
    assert json.loads(Path("out/config.json").read_text())["hidden_size"] == 16
    command = json.loads(Path("out/card.json").read_text())["command"]
    assert command == (
        "forkmerge compare bert_problem:recipe --targets reviews --set arguments.width=16 --methods ew --seeds 1"
    )
    Path("compared/plan.json").write_text("{}")
    invoke("export", run, "weights alone")
    assert "plan.json" in error_of("export", run, "again", "--format", "hf", "--trust")
    Path(run, "result.json").unlink()
    assert "is a run of what is compared in" in error_of("resume", run)
