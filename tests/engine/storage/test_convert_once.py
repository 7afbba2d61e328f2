"""Files and folders that are made once and read afterwards."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from forkmerge.engine.storage.atomic_files import TEMPORARY
from forkmerge.engine.storage.convert_once import convert_once, key_of
from forkmerge.errors import ProblemError, StoreError


def read_text(path: Path) -> str | None:
    return path.read_text() if path.is_file() and path.read_text().endswith(".") else None


def read_folder(path: Path) -> str | None:
    return read_text(path / "part")


def write_folder(path: Path) -> None:
    path.mkdir()
    (path / "part").write_text("whole.")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache" / "abc.txt"


def test_it_is_made_where_it_is_missing_and_only_then(path: Path) -> None:
    made: list[str] = []

    def write(temporary: Path) -> None:
        made.append(temporary.name)
        assert not path.exists()
        temporary.write_text("whole.")

    assert [convert_once(path, read_text, write) for _ in range(2)] == ["whole.", "whole."]
    assert len(made) == 1
    assert os.listdir(path.parent) == ["abc.txt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_conversion_leaves_nothing_and_is_done_again(path: Path, error: BaseException) -> None:
    def fail(temporary: Path) -> None:
        temporary.write_text("hal")
        raise error

    message = rf"^cannot write {path}: No space left on device\.$"
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else pytest.raises(StoreError, match=message):
        convert_once(path, read_text, fail)
    assert os.listdir(path.parent) == []
    assert convert_once(path, read_text, lambda temporary: temporary.write_text("whole.") and None) == "whole."


def test_what_is_damaged_is_made_again(tmp_path: Path) -> None:
    file, folder = tmp_path / "file.txt", tmp_path / "folder"
    file.write_text("hal")
    folder.mkdir()
    (folder / "old").write_text("hal")
    assert convert_once(file, read_text, lambda temporary: temporary.write_text("whole.") and None) == "whole."
    assert convert_once(folder, read_folder, write_folder) == "whole."
    assert sorted(str(item.relative_to(tmp_path)) for item in tmp_path.rglob("*")) == [
        *("file.txt", "folder", "folder/part"),
    ]


def test_what_cannot_be_read_after_it_was_made_is_named(path: Path) -> None:
    with pytest.raises(StoreError, match=r"abc\.txt cannot be read: remove it"):
        convert_once(path, read_text, lambda temporary: temporary.write_text("no full stop") and None)


def test_leftovers_of_a_kill_go_after_a_day(path: Path) -> None:
    path.parent.mkdir(parents=True)
    old, young, other = (path.with_name(f"{TEMPORARY}{name}") for name in ("abc-1.txt", "abc-2", "else-1.txt"))
    old.write_text("hal")
    young.mkdir()
    (young / "part").write_text("hal")  # the folder is older than what is being written into it
    other.write_text("hal")
    for leftover in (old, young, other):
        os.utime(leftover, (time.time() - 100_000,) * 2)
    convert_once(path, read_text, lambda temporary: temporary.write_text("whole.") and None)
    assert [item.exists() for item in (old, young, other)] == [False, True, True]


def test_a_key_knows_files_by_path_size_and_date_and_the_form(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for file in (first, second):
        file.write_text("same")
        os.utime(file, (5, 5))
    keys = [
        key_of("form", [first]),
        key_of("form", [second]),
        key_of("other", [first]),
        key_of("form", [first, second]),
    ]
    os.utime(first, (6, 6))
    keys.append(key_of("form", [first]))
    first.write_text("longer")
    os.utime(first, (5, 5))
    keys.append(key_of("form", [first]))
    assert len(set(keys)) == len(keys) == 6
    first.write_text("same")
    os.utime(first, (5, 5))
    assert key_of("form", [first]) == keys[0]
    with pytest.raises(ProblemError, match=r"^cannot read the image .*third: No such file or directory\.$"):
        key_of("form", [tmp_path / "third"], "image")
    with pytest.raises(ProblemError, match=r"^cannot read the file .*third: "):
        key_of("form", [tmp_path / "third"])


def test_a_key_is_a_short_name_for_any_file_name(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"not utf-8: \xff")
    odd.write_text("")
    assert re.fullmatch("[0-9a-f]{32}", key_of("form", [odd]))


def test_what_others_may_have_put_there_is_not_read_and_what_is_made_is_the_user_s_alone(path: Path) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text("whole.")

    convert_once(path, read_text, write)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o777)
    path.write_text("planted.")
    with pytest.raises(StoreError, match=rf"^{path.parent} can be written by other users"):
        convert_once(path, read_text, write)
    path.unlink()
    with pytest.raises(StoreError, match=rf"^{path.parent} can be written by other users"):
        convert_once(path, read_text, write)
    assert os.listdir(path.parent) == []


def test_a_file_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    """Their folder may have been open to them once."""
    file, before = tmp_path / "cache" / "map.npy", os.umask(0)
    try:
        assert convert_once(file, _text, lambda path: path.write_text("mine") and None) == "mine"
    finally:
        os.umask(before)
    assert convert_once(file, _text, lambda path: None) == "mine", "what is made is nobody else's, whatever the umask"
    file.chmod(0o666)
    with pytest.raises(StoreError, match=r"map\.npy can be written by other users"):
        convert_once(file, _text, lambda path: None)
    file.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(file, 12345, 12345)
        with pytest.raises(StoreError, match=r"map\.npy belongs to another user"):
            convert_once(file, _text, lambda path: None)


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None
