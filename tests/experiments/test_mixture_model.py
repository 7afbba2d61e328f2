"""The model of a mixture and its card."""

from __future__ import annotations

from pathlib import Path

import pytest

import forkmerge as fm
from forkmerge.experiments.mix import mix
from text_corpora import write_causal, write_lines


def test_the_card_says_the_base_model_also_when_it_is_told_later(tmp_path: Path) -> None:
    target, near = (write_lines(tmp_path / f"{name}.jsonl", name, 12) for name in ("da", "nb"))
    words = (target, [near], write_causal(tmp_path / "model"))
    options = {"steps": 2, "interval": 1, "length": 16, "batch_size": 2, "lr": 0.02}
    options |= {"out": tmp_path / "based", "baselines": False, "freeze_a": True}
    card = mix(*words, **options).model / "README.md"
    before, weights = card.read_text(), (card.parent / "model.safetensors").read_bytes()
    assert "base_model:" not in before
    assert "--freeze-a" in before
    for name in ("org/model", "org/other"):
        mix(*words, base_model=name, **options)
        assert card.read_text() == before.replace("---\n", f'---\nbase_model: "{name}"\n', 1)
    assert (card.parent / "model.safetensors").read_bytes() == weights
    with pytest.raises(fm.ProblemError, match="such as org/model"):
        mix(*words, base_model="a b", **{**options, "out": tmp_path / "nothing"})
    assert not (tmp_path / "nothing").exists()
