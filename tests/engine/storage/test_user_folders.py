"""Folders that belong to the user: who else may have written into them, and marks that only the user can make."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from forkmerge.engine.storage import user_folders
from forkmerge.engine.storage.user_folders import cache_folder, check_private, is_signed, make_private, sign
from forkmerge.errors import StoreError


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_caches_lie_where_the_user_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("images") == tmp_path / "forkmerge/images"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder("images") == tmp_path / "home/.cache/forkmerge/images"


def test_a_private_folder_is_for_the_user_alone(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    assert mode_of(tmp_path / "a/b") == 0o700
    make_private(tmp_path / "a" / "b")
    check_private(tmp_path / "absent")
    (tmp_path / "c").mkdir(mode=0o755)
    make_private(tmp_path / "c")
    assert mode_of(tmp_path / "c") == 0o755


@pytest.mark.parametrize("mode", [0o777, 0o772, 0o770, 0o1777])
def test_a_folder_that_others_can_write_is_refused_with_what_to_type(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_folders, "_is_own_group", lambda number: False)
    folder = tmp_path / "a folder"
    folder.mkdir()
    folder.chmod(mode)
    for check in (check_private, make_private):
        with pytest.raises(StoreError, match=rf"^{folder} can be written by other users, .* chmod go-w '{folder}'"):
            check(folder)


def test_a_group_of_the_user_alone_is_no_danger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o770)
    user = user_folders.pwd.getpwuid(os.geteuid()).pw_name

    def group(name: str, members: list[str]) -> Any:
        return lambda number: user_folders.grp.struct_group((name, "", number, members))

    for members in ([], [user]):
        monkeypatch.setattr(user_folders.grp, "getgrgid", group(user, members))
        check_private(tmp_path)
    for name, members in (("staff", []), (user, ["eve"]), (user, [user, "eve"])):
        monkeypatch.setattr(user_folders.grp, "getgrgid", group(name, members))
        with pytest.raises(StoreError, match="can be written by other users"):
            check_private(tmp_path)
    tmp_path.chmod(0o772)
    monkeypatch.setattr(user_folders.grp, "getgrgid", group(user, []))
    with pytest.raises(StoreError, match="can be written by other users"):
        check_private(tmp_path)


def test_a_folder_of_another_user_is_refused_and_one_of_root_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    (tmp_path / "own").mkdir(mode=0o700)
    if tmp_path.stat().st_uid:
        with pytest.raises(StoreError, match=rf"^{tmp_path}/own belongs to another user, .*choose another folder"):
            check_private(tmp_path / "own")
    else:  # which nobody needs to fear who fears nobody else
        check_private(tmp_path / "own")
        os.chown(tmp_path / "own", 12345, 12345)
        with pytest.raises(StoreError, match=rf"^{tmp_path}/own belongs to another user, .*choose another folder"):
            check_private(tmp_path / "own")


def test_a_system_without_owners_has_nothing_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(user_folders, "pwd", None)
    check_private(tmp_path)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first place of the secret; the others lie beside it."""
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "XDG_STATE_HOME/forkmerge"


def test_only_who_has_the_secret_can_sign(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_signed({"a": 1}, "x")
    assert not state.exists(), "looking makes no secret"
    mark = sign({"a": 1})
    assert mark is not None
    assert len(mark) == 64
    assert sign({"a": 1}) == mark
    assert is_signed({"a": 1}, mark)
    for value, other in (({"a": 2}, mark), ({"a": 1}, mark[:-1]), ({"a": 1}, None), ({"a": 1}, "")):
        assert not is_signed(value, other)
    assert (mode_of(state), mode_of(state / "secret")) == (0o700, 0o600)
    monkeypatch.setenv("XDG_STATE_HOME", str(state.parent.with_name("of another user")))
    assert not is_signed({"a": 1}, mark)
    assert sign({"a": 1}) != mark


def test_without_a_home_to_write_the_secret_is_kept_elsewhere_and_found_again(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [state, state.parents[1] / "XDG_RUNTIME_DIR/forkmerge", state.parents[1] / f"forkmerge-{os.geteuid()}"]
    marks = []
    for place in places:
        marks.append(sign("x"))
        assert (place / "secret").exists()
        if place != places[-1]:
            os.rename(place, place.with_name("aside"))
            place.write_text("in the way")
    assert len(set(marks)) == 3
    places[-1].rename(places[-1].with_name("gone"))
    places[-1].touch()
    assert sign("x") is None
    for place in places[:2]:
        place.unlink()
        place.with_name("aside").rename(place)
    assert [is_signed("x", mark) for mark in marks] == [True, True, False]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert [is_signed("x", mark) for mark in marks] == [True, False, False]


def test_the_state_folder_is_in_the_home_unless_said_otherwise(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(state.parents[1] / "home"))
    assert sign("x")
    assert (state.parents[1] / "home/.local/state/forkmerge/secret").exists()


def test_a_secret_that_others_know_or_that_is_none_is_not_used(state: Path) -> None:
    mark = sign("x")
    secret = state / "secret"
    secret.chmod(0o640)
    assert not is_signed("x", mark)
    assert sign("x") != mark, "another one is made elsewhere"
    secret.chmod(0o600)
    assert is_signed("x", mark)
    secret.write_bytes(secret.read_bytes()[:31])
    assert not is_signed("x", mark)
    secret.unlink()
    secret.symlink_to("/dev/zero")
    assert not is_signed("x", mark)
    secret.unlink()
    os.mkfifo(secret, 0o600)
    assert not is_signed("x", mark)
