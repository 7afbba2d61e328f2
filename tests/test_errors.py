"""Errors that say what to do next, and the checks of names and numbers that raise them."""

from __future__ import annotations

from typing import Any

import pytest

from forkmerge.errors import (
    ConfigError,
    ForkMergeError,
    ProblemError,
    StoreError,
    check_count,
    check_keys,
    check_name,
    command,
    is_count,
    printable,
    unknown_name,
)


def test_every_error_is_one_of_ours() -> None:
    assert all(issubclass(kind, ForkMergeError) for kind in (ProblemError, ConfigError, StoreError))


def test_an_unknown_name_lists_what_exists_and_offers_the_closest() -> None:
    assert unknown_name("task", "tgd", ["tgt", "aux"]) == "unknown task 'tgd'. Did you mean 'tgt'? Known: tgt, aux."
    assert unknown_name("task", "zzz", ["tgt", 3]) == "unknown task 'zzz'. Known: tgt, 3."
    assert unknown_name("task", 7, []) == "unknown task '7'. Known: none."


@pytest.mark.parametrize(("value", "least"), [(1, 1), (3, 1), (0, 0)])
def test_what_counts(value: int, least: int) -> None:
    assert is_count(value, least)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None])
def test_what_does_not_count_is_named_with_what_arrived(value: Any) -> None:
    assert not is_count(value)
    with pytest.raises(ConfigError, match=r"^steps must be a positive integer, got .*\.$") as caught:
        check_count("steps", value, error=ConfigError)
    assert repr(value) in str(caught.value)
    assert check_count("steps", 4) == 4


@pytest.mark.parametrize("name", ["a", "task 1", "λ", "a.b", "x" * 100])
def test_names_that_may_stand_anywhere(name: str) -> None:
    assert check_name("branch", name) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "must be a non-empty string"),
        (None, "must be a non-empty string, got None"),
        *((name, "would leave its folder") for name in ("a/b", "..", ".hidden", " a", "a\\b", "C:x", "a\nb")),
        ("é" * 51, "is longer than 100 bytes"),
    ],
)
def test_names_that_may_not_say_why(name: Any, message: str) -> None:
    with pytest.raises(ProblemError, match=f"branch name .*{message}"):
        check_name("branch", name)


def test_a_command_is_said_by_the_name_it_was_called_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORKMERGE_COMMAND", raising=False)
    assert command("resume r") == "forkmerge resume r"
    monkeypatch.setenv("FORKMERGE_COMMAND", "./run")
    assert command("resume r") == "./run resume r"


def test_keys_of_a_table_are_checked_by_name() -> None:
    check_keys("[table]", {"a": 1}, ("a", "b"))
    with pytest.raises(ConfigError, match=r"^\[table\]: unknown key 'seed'. Did you mean 'seeds'\? Known: seeds, b\.$"):
        check_keys("[table]", {"b": 1, "seed": 2}, ("seeds", "b"))
    with pytest.raises(ConfigError, match=r"^\[table\] must be a table, got 3\.$"):
        check_keys("[table]", 3, ("a",))


def test_what_a_terminal_would_obey_becomes_its_code() -> None:
    hostile = "a\x1b[31mred\x07\x9b2J\x7f\r\u202eabc\u2066\ud800"
    assert printable(hostile) == r"a\u001b[31mred\u0007\u009b2J\u007f\u000d\u202eabc\u2066\ud800"
    assert printable(hostile).encode()
    harmless = "Δ_m − λ…\n\ttab, é, 你好, a\u00a0b, 👩\u200d🔬"
    assert printable(harmless) == harmless
