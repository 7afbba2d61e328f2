"""JSON files that hold their own checksum: a change is noticed, and the file is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forkmerge.engine.storage.json_codec import encode, pack
from forkmerge.engine.storage.json_files import (
    checksum,
    interpreting,
    is_torn,
    parse,
    parse_object,
    read_object,
    read_versioned,
    with_checksum,
    write_object,
    write_versioned,
)
from forkmerge.errors import StoreError

CONTENT = {"format": 1, "name": "é", "scores": [0.1, None, 1e-300, 10**30], "deep": {"a": {"b": [True]}}}


def test_a_file_is_readable_by_people_and_ends_with_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_object(path, CONTENT)
    data = json.loads(path.read_text())
    assert list(data) == [*CONTENT, "sha256"]
    assert data["sha256"] == checksum(CONTENT) == "af402ff81f38687dd64cfaf73f7dc28437322150fa053dfe8ae04458cc1efc62"
    assert path.read_text().startswith('{\n  "format": 1,\n')
    assert read_object(path) == CONTENT
    path.write_text(json.dumps(data))  # in another form
    assert read_object(path) == CONTENT


def test_what_an_earlier_version_wrote_has_no_checksum_and_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_object(tmp_path / "a.json") == {"a": 1}
    with pytest.raises(StoreError, match=rf"^cannot read {tmp_path}/b\.json: No such file or directory\.$"):
        read_object(tmp_path / "b.json")


def test_a_line_has_a_short_checksum() -> None:
    assert with_checksum({"a": 1}, "crc32") == {"a": 1, "crc32": "5c47a1fa"}
    assert parse_object(b'{"a": 1, "crc32": "5c47a1fa"}', "it", "crc32") == {"a": 1}
    with pytest.raises(StoreError, match=r"^line 3 is damaged: it does not match its own checksum\.$"):
        parse_object(b'{"a": 2, "crc32": "5c47a1fa"}', "line 3", "crc32")


@pytest.mark.parametrize("kind", ["sha256", "crc32"])
def test_every_flipped_bit_is_named_or_changes_nothing(kind: str) -> None:
    text = json.dumps(with_checksum(CONTENT, kind), indent=1).encode()
    same = 0
    for position in range(len(text)):
        for bit in range(8):
            changed = bytearray(text)
            changed[position] ^= 1 << bit
            try:
                data = parse_object(bytes(changed), "the file", kind)
            except StoreError:
                continue
            assert {key: data[key] for key in CONTENT} == CONTENT
            same += 1  # the name of the checksum itself, or another spelling
    assert same < 8 * len(kind) + 20


@pytest.mark.parametrize("text", ["[]", "null", "3", '"text"', "true"])
def test_what_is_no_object_is_refused_by_name(text: str) -> None:
    with pytest.raises(StoreError, match=r"^the file holds no JSON object\.$"):
        parse_object(text.encode(), "the file")


@pytest.mark.parametrize("text", [b"", b"{", b"\0\0", b'{"a": 1}x', b'"\xff"'])
def test_what_is_no_json_is_refused_by_name(text: bytes) -> None:
    with pytest.raises(StoreError, match=r"^the file is not JSON: "):
        parse(text, "the file")


def test_deep_nesting_is_refused_by_name_and_all_that_we_write_is_not_that_deep() -> None:
    for depth in (501, 100_000):
        for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            with pytest.raises(StoreError, match=r"^the file is (nested more than 500 deep|not JSON: .*recursion)"):
                parse(text.encode(), "the file")
    assert parse(b"[" * 500 + b"]" * 500, "the file")
    value: Any = 0
    for _ in range(99):
        value = {(1, 2): value}
    assert parse(json.dumps(pack(value)[0]).encode(), "the file")


def test_a_checksum_of_numbers_that_json_does_not_have_is_damage() -> None:
    for text in (b'{"a": NaN, "sha256": "x"}', b'{"a": 1, "sha256": ["x"]}'):
        with pytest.raises(StoreError, match="does not match its own checksum"):
            parse_object(text, "the file")


def test_a_torn_line_is_told_from_one_whose_end_has_changed() -> None:
    line = json.dumps(with_checksum({"a": {"b": [{}]}}, "crc32")).encode()
    assert all(is_torn(line[:size]) for size in range(1, len(line) + 1))
    assert not is_torn(line + b"\n")
    assert not is_torn(line + b"\x0b")
    assert is_torn(b"[" * 100_000)


def test_whatever_comes_of_taking_a_file_for_what_it_is_not_names_it() -> None:
    with (
        pytest.raises(StoreError, match=r"^the file is not a plan: it lacks 'x'\.$"),
        interpreting("the file", "a plan"),
    ):
        raise KeyError("x")
    for error in (IndexError, AttributeError, TypeError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        match = rf"^the file is not a plan: {error.__name__}\.$"
        with pytest.raises(StoreError, match=match), interpreting("the file", "a plan"):
            raise error
    with pytest.raises(StoreError, match=r"^mine$"), interpreting("the file", "a plan"):
        raise StoreError("mine")


def test_a_versioned_file_holds_what_is_asked_for_or_says_what_it_is_not(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    def read(text: str, remedy: str = "") -> dict[str, Any]:
        path.write_text(text)
        return read_versioned(path, 3, ["b", "a"], "a plan", remedy)

    assert read('{"format": 3, "a": 1, "b": 2, "c": 4}') == {"format": 3, "a": 1, "b": 2, "c": 4}
    with pytest.raises(StoreError, match=rf"^{path} has format 2, not 3: use the forkmerge that wrote it\.$"):
        read('{"format": 2, "a": 1, "b": 2}')
    with pytest.raises(StoreError, match=rf"^{path} is not a plan: it lacks 'a', 'b'\.$"):
        read('{"format": 3}')
    for text in ("{", "[]", "{}", "3"):
        with pytest.raises(StoreError, match=rf"^{path} is not a plan: .*\. Delete it and run again\.$"):
            read(text, "it")
    path.unlink()
    with pytest.raises(StoreError, match=rf"^cannot read {path}: No such file or directory\.$"):
        read_versioned(path, 3, [], "a plan")


def test_a_versioned_file_begins_with_its_version_and_makes_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    write_versioned(path, 3, {"a": (1, float("nan")), "b": {2: "x"}})
    assert path.read_bytes().startswith(b'{\n  "format": 3,\n')
    assert read_versioned(path, 3, ["a"], "a plan") == {"format": 3, "a": [1, None], "b": {"2": "x"}}
    with pytest.raises(StoreError, match="cannot make the folder"):
        write_versioned(path / "inside" / "plan.json", 3, {})


@pytest.mark.parametrize("kind", ["sha256", "crc32"])
def test_a_damaged_name_of_the_checksum_does_not_hide_it(kind: str) -> None:
    whole = encode(with_checksum({"a": 1, "b": "x"}, kind))
    assert parse_object(whole, "it", kind) == {"a": 1, "b": "x"}
    for changed in (kind[:-1] + "7", "x" + kind[1:]):
        with pytest.raises(StoreError, match="it is damaged: it does not match its own checksum"):
            parse_object(whole.replace(kind.encode(), changed.encode()), "it", kind)
    assert parse_object(b'{"a": 1, "b": "x"}', "it", kind) == {"a": 1, "b": "x"}
