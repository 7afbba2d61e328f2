"""A run of a transformers model leaves as a folder that `from_pretrained` loads, and hubs can read its card."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification

import forkmerge as fm
from command_line import invoke
from forkmerge.algorithms.export import export_run
from forkmerge.experiments.hf_export import TransformersFolder, export_pretrained


def tiny(name: str = "") -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    model = BertForSequenceClassification(config)
    model.config._name_or_path = name
    return model


def sentences(count: int, seed: int) -> TensorDataset:
    tokens = torch.randint(20, (count, 6), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, (tokens < 10).sum(1).gt(3).long())


def losses(model: nn.Module, batch: Any, tasks: Any, context: Any) -> dict[str, torch.Tensor]:
    tokens, labels = batch
    return {task: cross_entropy(model(tokens).logits, labels) for task in tasks}


def predict(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch[0]).logits, batch[1]


def recipe(model: Any = tiny) -> fm.Recipe:
    streams = [fm.Stream(sentences(16, seed), losses, task, 8) for seed, task in enumerate(("reviews", "news"))]
    problem = fm.Problem("reviews", streams, fm.Evaluation(sentences(16, 5), fm.accuracy, predict))
    return fm.Recipe(problem, model, fm.OptimizerOf("AdamW", lr=1e-2), 4, fm.ForkMerge("mixed", interval=2))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "a run"
    recipe().fit(folder=folder, progress=False)
    return folder


def test_from_pretrained_loads_the_weights_of_the_run(run: Path, tmp_path: Path, capfd) -> None:
    out = export_pretrained(run, tmp_path / "out", tiny())
    assert capfd.readouterr() == ("", "")
    loaded = BertForSequenceClassification.from_pretrained(out).state_dict()
    expected = load_file(export_run(run, tmp_path / "plain") / "model.safetensors")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    card = json.loads((out / "card.json").read_text())
    assert {"config.json", "model.safetensors"} <= card["files"].keys()
    assert card["files"].keys() | {"README.md", "card.json"} == {path.name for path in out.iterdir()}


def test_hubs_read_the_card(run: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    out = export_pretrained(run, tmp_path / "out", tiny("google-bert/bert-base-uncased"))
    card = ModelCard.load(out / "README.md")
    told = json.loads((out / "card.json").read_text())
    assert card.data.base_model == "google-bert/bert-base-uncased"
    assert card.data.to_dict()["base_model_relation"] == "merge"
    assert card.data.library_name == "transformers"
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", told["validation"]["accuracy"])
    assert result.dataset_split == "validation"
    text = card.text
    assert "## Coefficients" in text
    assert "BertForSequenceClassification.from_pretrained" in text
    assert "## How it was made" in text
    assert told["command"] in text


def test_training_of_one_branch_is_no_merge() -> None:
    card = {"name": "x", "target": "t", "validation": {}, "test": {}, "branches": {"alone": {"t": 1.0}}}
    head = TransformersFolder(tiny()).head(card)
    assert 'base_model_relation: "finetune"' in head
    assert '"merge"' not in head


@pytest.mark.parametrize("name", ["", "/home/somebody/model", "../model", "a b"])
def test_a_path_is_no_base_model(run: Path, tmp_path: Path, name: str) -> None:
    out = export_pretrained(run, tmp_path / "out", tiny(name))
    assert "base_model:" not in (out / "README.md").read_text()


def test_the_base_of_a_model_from_a_local_folder_can_be_said(run: Path, tmp_path: Path) -> None:
    out = export_pretrained(run, tmp_path / "out", tiny("/home/somebody/model"), base_model="org/model-1")
    assert 'base_model: "org/model-1"' in (out / "README.md").read_text()
    with pytest.raises(fm.ProblemError, match="the name of a model on a hub, such as org/model"):
        export_pretrained(run, tmp_path / "other", tiny(), base_model="/home/somebody/model")


def test_no_name_breaks_the_metadata_and_no_infinite_metric_enters_it() -> None:
    import yaml

    name = 'a: b"\n---\n\u202e\u2028 größe'
    card = {
        "name": name,
        "target": name,
        "validation": {"nll": math.inf, "accuracy": 0.5},
        "test": None,
        "branches": {},
    }
    begin, *lines, end = TransformersFolder(tiny()).head(card).split("\n")
    assert begin == end == "---"
    (entry,) = yaml.safe_load("\n".join(lines))["model-index"]
    (result,) = entry["results"]
    assert result["metrics"] == [{"type": "accuracy", "name": "accuracy", "value": 0.5}]
    assert "größe" in entry["name"]


def test_another_model_is_refused_in_one_sentence(run: Path, tmp_path: Path) -> None:
    with pytest.raises(fm.ProblemError, match=r"torch\.nn\.modules\.linear:Linear, which is no PreTrainedModel"):
        export_pretrained(run, tmp_path / "out", nn.Linear(2, 2))
    assert not (tmp_path / "out").exists()


class TestCommand:
    @pytest.fixture(autouse=True)
    def problem(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        source = Path(__file__).read_text("utf-8").partition("@pytest.fixture")[0]
        Path("hf_problem.py").write_text(source.replace("from command_line import invoke\n", ""))
        Path("torch_problem.py").write_text(
            "from torch import nn\nimport hf_problem\n"
            "class Wrapped(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n        self.inner = hf_problem.tiny()\n"
            "    def forward(self, x):\n        return self.inner(x)\n"
            "def recipe():\n    return hf_problem.recipe(Wrapped)\n"
        )

    def test_a_run_of_a_recipe_is_exported_for_transformers(self) -> None:
        invoke("run", "hf_problem:recipe", "--out", "a", "--no-reference")
        words = ("export", "a", "out", "--format", "hf", "--base-model", "org/bert")
        files = json.loads(invoke(*words, "--json").stdout)["files"]
        assert "out/config.json" in files
        assert 'base_model: "org/bert"' in Path("out/README.md").read_text()
        assert BertForSequenceClassification.from_pretrained("out").config.hidden_size == 16

    def test_a_run_of_another_model_says_that_it_cannot_be(self) -> None:
        invoke("run", "torch_problem:recipe", "--out", "a", "--no-reference")
        done = invoke("export", "a", "out", "--format", "hf", code=2)
        assert "which is no PreTrainedModel of transformers" in " ".join(done.stderr.split())
        assert not Path("out").exists()
        done = invoke("export", "a", "out", "--format", "hg", code=2)
        assert "unknown format 'hg'. Known: torch, hf." in done.stderr

    def test_the_code_of_somebody_else_s_run_is_not_run_without_a_flag(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        invoke("run", "hf_problem:recipe", "--out", "a", "--no-reference")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state of another"))
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        done = invoke("export", "a", "out", "--format", "hf", code=2)
        told = " ".join(done.stderr.split())
        assert "To write its model for transformers is to run hf_problem:recipe" in told
        assert "if you trust it, add --trust" in told
        assert not Path("out").exists()
        invoke("export", "a", "plain")  # which only reads
        invoke("export", "a", "out", "--format", "hf", "--trust")

    def test_a_run_that_python_started_says_what_to_call(self, run: Path) -> None:
        done = invoke("export", run, "out", "--format", "hf", code=2)
        assert "export_pretrained(" in "".join(done.stderr.split())
