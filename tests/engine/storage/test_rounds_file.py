"""The rounds of a run, one line each."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

import forkmerge as fm
from disk_faults import Faults, Killed, each_fault
from forkmerge.engine.storage.json_codec import encode
from forkmerge.engine.storage.json_files import with_checksum
from forkmerge.engine.storage.rounds_file import NoRounds, RoundsFile

VALUES = [{"score": 0.1, "losses": {"a": (1, 2)}}, {"score": None, 7: [math.inf]}, {"text": "line\nline"}]


def filled(path: Path) -> RoundsFile:
    file = RoundsFile(path / "rounds.jsonl")
    for position, value in enumerate(VALUES, start=1):
        file.append(position, value)
    return file


def test_rounds_come_back_as_they_were(tmp_path: Path) -> None:
    assert filled(tmp_path).read(3) == VALUES
    assert filled(tmp_path).read(2) == VALUES[:2]


def test_no_file_is_no_rounds(tmp_path: Path) -> None:
    assert RoundsFile(tmp_path / "rounds.jsonl").read(0) == []
    RoundsFile(tmp_path / "rounds.jsonl").keep([])
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_line_is_taken_from_the_record(tmp_path: Path) -> None:
    file, draw = filled(tmp_path), random.Random(1)
    text, damaged = file.path.read_bytes(), 0
    lines = [{"event": "round", "index": position, "from": "record"} for position in (1, 2, 3)]
    (tmp_path / "record.jsonl").write_bytes(b"".join(encode(with_checksum(line, "crc32")) for line in lines))
    for _ in range(200):
        changed = bytearray(text)
        changed[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
        file.path.write_bytes(changed)
        pairs = list(zip(file.read(3), VALUES, lines, strict=True))
        assert all(value in (own, recorded) for value, own, recorded in pairs)
        damaged += sum(value == recorded for value, _, recorded in pairs)
    assert 200 <= damaged < 220, "a newline that is gone costs two lines"


def test_a_round_that_is_damaged_in_both_is_named(tmp_path: Path) -> None:
    file = filled(tmp_path)
    file.path.write_bytes(file.path.read_bytes().replace(b"null", b"true"))
    (tmp_path / "record.jsonl").write_bytes(b'{"event": "round", "index": [1]}\n{"event": "round", "ind\n')
    with pytest.raises(fm.StoreError, match=r"round 2 is damaged in rounds\.jsonl and in record\.jsonl"):
        file.read(3)
    with pytest.raises(fm.StoreError, match=r"round 4 is damaged"):
        filled(tmp_path).read(10**18)


def test_rounds_of_another_run_are_refused_and_those_that_do_not_say_whose_they_are_are_not(tmp_path: Path) -> None:
    own, other = RoundsFile(tmp_path / "rounds.jsonl", "a"), RoundsFile(tmp_path / "rounds.jsonl", "b")
    filled(tmp_path)  # as an earlier version did
    assert own.read(3) == VALUES
    own.keep(VALUES[:2])
    own.append(3, VALUES[2])
    assert own.read(3) == VALUES
    with pytest.raises(fm.StoreError, match=r"rounds\.jsonl was written by another run"):
        other.read(1)


def test_keep_writes_only_where_something_else_is_there(tmp_path: Path) -> None:
    file = filled(tmp_path)
    before = file.path.stat()
    file.keep(VALUES)
    assert (file.path.stat().st_mtime_ns, file.path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    file.keep(VALUES[:2])
    assert file.read(2) == VALUES[:2]
    assert len(file.path.read_bytes().splitlines()) == 2
    file.append(3, VALUES[2])
    assert file.read(3) == VALUES


@pytest.mark.parametrize("mode", ["before", "torn", "after"])
def test_killed_in_any_change_of_the_disk_the_rounds_before_are_whole(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch)
    faults.mode = mode

    def act() -> None:
        file.append(4, {"score": 0.4})
        file.keep([*VALUES[:2], {"other": 1}, {"score": 0.4}])
        file.append(5, {"score": 0.5})

    file = filled(tmp_path)
    for _ in each_fault(faults, Killed(), act):
        assert file.read(2) == VALUES[:2]
        file.keep(VALUES)
        assert file.read(3) == VALUES


def test_a_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fm.StoreError, match=r"round 1: .* is a tensor"):
        RoundsFile(tmp_path / "rounds.jsonl").append(1, {"row": torch.zeros(2)})


def test_a_run_that_keeps_nothing_has_none() -> None:
    rounds = NoRounds()
    rounds.append(1, {})
    rounds.keep([{}])
    assert rounds.read(1) == []
