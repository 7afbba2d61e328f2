"""Small corpora, and a language model that is made in a moment, for tests of mixtures."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM


def text_of(language: str, key: object, words: int = 40) -> str:
    """A text of random words of a language."""
    own = random.Random(language)
    vocabulary = [f"{language}{own.randrange(90)}" for _ in range(60)]
    draw = random.Random(f"{language} {key}")
    return " ".join(draw.choice(vocabulary) for _ in range(words))


def write_lines(path: Path, language: str, count: int, first: int = 0) -> Path:
    """Write a corpus as JSON lines, each with a text and the page it is of."""
    entries = [{"text": text_of(language, f"{path.stem} {i}"), "page": f"p{i}"} for i in range(first, first + count)]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), "utf-8")
    return path


def write_causal(folder: Path, vocabulary: int = 257) -> Path:
    """Write a causal language model over bytes with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    return folder


def write_encoder(folder: Path) -> Path:
    """Write an encoder over bytes with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=258, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    return folder
