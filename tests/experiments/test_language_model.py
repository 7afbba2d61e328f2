"""Language models of transformers from a folder: whole or adapted, causal or not, with a tokenizer or over bytes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import forkmerge as fm
from forkmerge.experiments.language_model import LanguageModel
from text_corpora import write_causal, write_encoder


def test_adapters_are_all_that_is_trained_unless_all_weights_are(tmp_path: Path) -> None:
    folder = str(write_causal(tmp_path))
    trained = [name for name, weight in LanguageModel(folder)().named_parameters() if weight.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert all(weight.requires_grad for weight in LanguageModel(folder, full=True)().parameters())
    assert pickle.loads(pickle.dumps(LanguageModel(folder))) == LanguageModel(folder)


def test_first_factors_can_be_frozen(tmp_path: Path) -> None:
    folder = str(write_causal(tmp_path))
    trained = [name for name, p in LanguageModel(folder, freeze_a=True)().named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_B" in name for name in trained)
    with pytest.raises(fm.ProblemError, match="--freeze-a is about adapters: leave --full out"):
        LanguageModel(folder, full=True, freeze_a=True)


def test_a_configuration_alone_starts_from_random_weights_and_needs_them_all(tmp_path: Path) -> None:
    config = write_causal(tmp_path) / "config.json"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(fm.ProblemError, match="no weights to put adapters on: train all of it, with --full"):
        LanguageModel(str(tmp_path))
    for path in (tmp_path, config):
        torch.manual_seed(1)
        assert sum(weight.numel() for weight in LanguageModel(str(path), full=True)().parameters()) > 1000


def test_an_encoder_is_told_from_a_causal_model(tmp_path: Path) -> None:
    assert not LanguageModel(str(write_causal(tmp_path / "a"))).is_encoder
    encoder = LanguageModel(str(write_encoder(tmp_path / "b")))
    assert encoder.is_encoder
    assert encoder.mask_token == 257
    assert encoder.window_length(100) == 32


def test_tokens_of_a_tokenizer_stand_for_all_bytes_of_the_text(tmp_path: Path) -> None:
    write_causal(tmp_path)
    vocabulary = {"<s>": 0, "<unk>": 1, "snø": 2, "is": 3, "cold": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>").save_pretrained(tmp_path)
    text = "snø is  cold \n"
    rows, sizes = LanguageModel(str(tmp_path)).windows([text, ""], 2).tensors
    assert rows.tolist() == [[0, 2, 3], [3, 4, -100]]
    assert sizes.tolist() == [7, 8]
    assert sizes.sum() == len(text.encode())


def test_what_cannot_be_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fm.ProblemError, match=r"there is no config\.json"):
        LanguageModel(str(tmp_path))
    small = LanguageModel(str(write_causal(tmp_path / "small", vocabulary=100)))
    with pytest.raises(fm.ProblemError, match="no tokenizer, and the model knows 100 tokens"):
        small.windows(["text"], 8)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(fm.ProblemError, match="as a configuration of transformers"):
        assert LanguageModel(str(tmp_path), full=True).config
