"""From what was typed to what is asked for."""

from __future__ import annotations

import pytest

import forkmerge as fm
from forkmerge.cli.arguments import overrides_from, tune_from


def test_values_are_toml_and_single_words_need_no_quotes() -> None:
    overrides = overrides_from(
        {"steps": 3, "seed": None}, ["a.b=1e-3", "a.c=[1, 2]", "d=word", 'e="two words"', "f.g.h=true", "a.i={j = 1}"]
    )
    assert overrides == {
        "steps": 3,
        "a": {"b": 0.001, "c": [1, 2], "i": {"j": 1}},
        "d": "word",
        "e": "two words",
        "f": {"g": {"h": True}},
    }
    for wrong in ("x", "=1", "a.=1", "a=two words", "a=1\nb=2"):
        with pytest.raises(fm.ConfigError, match="--set"):
            overrides_from({}, [wrong])


@pytest.mark.parametrize("text", ["lr", "lr=", "=1,2", "lr=fast", "lr=0,1", "lr=true"])
def test_tuning_without_values_is_refused(text):
    with pytest.raises(fm.ConfigError, match="--tune"):
        tune_from([text])


def test_values_to_tune_are_numbers_words_or_claims():
    assert tune_from(["lr=0.003, 1e-2", "bn=average,recompute", "floor=true,false", "interval=5,5,10"]) == {
        "lr": [0.003, 0.01],
        "bn": ["average", "recompute"],
        "floor": [True, False],
        "interval": [5, 10],
    }
