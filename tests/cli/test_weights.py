"""Weights from the command line: those of a run are written elsewhere, those on disk are merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from command_line import invoke


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
