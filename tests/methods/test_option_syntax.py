"""Options as text: one way to split them, read values and write them back."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forkmerge.errors import ConfigError
from forkmerge.methods.option_syntax import (
    option_from,
    show_options,
    split_assignment,
    split_call,
    split_options,
    split_words,
)


@pytest.mark.parametrize(
    "options",
    [
        {"mixtures": {"name": "nested_top_k", "probe_steps": 2, "sizes": [1, 2]}},
        {"task_weights": {"tgt": 1, "with space": 0.5}, "select": "best"},
        {"text": "a, b] '", "word": "true", "none": None, "yes": True, "other": "True"},
    ],
)
def test_options_are_read_back_from_the_word_that_shows_them(options: dict[str, Any]) -> None:
    assert split_options("ew" + show_options(options)) == ("ew", options)
    assert split_words(f"stl,ew{show_options(options)},uw") == ["stl", f"ew{show_options(options)}", "uw"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("200", 200), ("-0.5", -0.5), (".5", 0.5), ("1e-3", 1e-3), ("5.", 5.0)),
        *(("true", True), ("True", True), ("False", False), ("none", None), ("None", None)),
        *(("[1, 2]", [1, 2]), ("(1, 2)", (1, 2)), ("{a = 1}", {"a": 1}), ("{'a': 1}", {"a": 1}), ("inf", math.inf)),
        *(("best", "best"), ("'with space'", "with space"), ('"a,b"', "a,b"), ("module:name", "module:name")),
    ],
)
def test_values_are_written_as_in_toml_or_python_and_words_without_quotes(text: str, value: object) -> None:
    assert option_from("here", text) == value
    assert type(option_from("here", text)) is type(value)


@pytest.mark.parametrize("text", ["", "two words", "1 2", "[1", "open()", "1\nother = 2"])
def test_what_is_no_value_is_refused_with_where_it_stands(text: str) -> None:
    with pytest.raises(ConfigError, match=r"here: .* is not a TOML value such as 200"):
        option_from("here", text)


def test_arguments_of_a_call_have_keys_or_none() -> None:
    assert split_call("UPGrad", "(") == ("UPGrad", [])
    assert split_call(" UPGrad( ) ", "(") == ("UPGrad", [])
    assert split_call("A(B(c=1), key = [1, 2],d='=')", "(") == ("A", [("", "B(c=1)"), ("key", "[1, 2]"), ("d", "'='")])
    assert split_assignment("algorithm.interval = 5 ") == ("algorithm.interval", "5")
    assert split_assignment("=5") == ("", "5")


@pytest.mark.parametrize("word", ["ew[lr]", "ew[=3]", "ew[a=1,a=2]", "ew[a=1,2]"])
def test_options_without_a_key_or_twice_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"write WORD\[key=value"):
        split_options(word)


@pytest.mark.parametrize("word", ["ew[lr=1", "ew[lr=1)", "ew[lr='1]"])
def test_what_is_not_closed_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="no closing"):
        split_options(word)
