"""A sentence encoder with random weights, in the files of a published one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def write_encoder(folder: Path, words: Sequence[str], channels: int) -> Path:
    """Write a small BERT that knows some words, and return its folder."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir()
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": channels, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=5 + len(words), **sizes)).save_pretrained(folder)
    return folder
