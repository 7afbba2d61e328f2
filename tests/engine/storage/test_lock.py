"""One process per folder: who holds the lock, and when it is given back."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forkmerge.engine.storage import lock
from forkmerge.engine.storage.atomic_files import TEMPORARY
from forkmerge.engine.storage.lock import locked_folder, take_lock, try_lock
from forkmerge.engine.storage.run_folder import RunFolder, status
from forkmerge.errors import StoreError
from run_folders import lines

RUNNING = """
import itertools, sys, torch
from forkmerge.engine.storage.run_folder import RunFolder
with RunFolder.create(sys.argv[1], {}) as folder:
    for step in itertools.count(1):
        folder.record({"step": step})
        folder.save({"step": step, "row": torch.full((50_000,), float(step))}, step)
        if step == 3:
            print("ready", flush=True)
"""


def test_a_running_run_is_locked_until_it_is_killed_and_then_continues(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNING, str(run)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            assert status(run) == "running"
            with pytest.raises(StoreError, match="already running in another process"):
                RunFolder.open(run)
            with RunFolder.open(run, lock=False) as folder:
                value = folder.load()
                assert value is not None
                assert value["row"].eq(value["step"]).all()
        finally:
            process.send_signal(signal.SIGKILL)
    assert status(run) == "interrupted"
    with RunFolder.open(run) as folder:
        assert status(run) == "running"
        value = folder.load()
        assert value is not None
        assert value["row"].eq(value["step"]).all()
        assert list(folder.records()) == lines(value["step"])
        assert folder.warnings == []
    assert status(run) == "interrupted"


def test_the_lock_also_holds_inside_one_process_and_is_released_by_close(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    with pytest.raises(StoreError, match="already running"):
        RunFolder.open(tmp_path / "run")
    folder.close()
    folder.close()
    RunFolder.open(tmp_path / "run").close()


def test_close_releases_the_lock_even_if_a_forked_worker_holds_a_copy_of_it(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    assert folder._lock is not None
    copy = os.dup(folder._lock.fileno())
    folder.close()
    RunFolder.open(tmp_path / "run").close()
    os.close(copy)


def test_a_lock_is_exclusive_shared_or_given_back(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("ab") as first, (tmp_path / "lock").open("rb") as second:
        assert try_lock(first, "LOCK_SH")
        assert try_lock(second, "LOCK_SH")
        assert not try_lock(first, "LOCK_EX")
        assert try_lock(second, "LOCK_UN")
        assert try_lock(first, "LOCK_EX")
        assert not try_lock(second, "LOCK_SH")


def test_a_file_system_or_machine_without_locks_is_as_if_nobody_else_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with (tmp_path / "lock").open("ab") as file:
        monkeypatch.setattr(lock.fcntl, "flock", refuse)
        assert try_lock(file, "LOCK_EX")
        monkeypatch.setattr(lock, "fcntl", None)
        assert try_lock(file, "LOCK_EX")


def test_a_lock_held_for_an_instant_is_waited_for_and_a_longer_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with take_lock(tmp_path) as other:
        waits: list[float] = []
        monkeypatch.setattr(lock.time, "sleep", waits.append)
        with pytest.raises(StoreError, match=rf"^{tmp_path} is already running in another process: wait for it or"):
            take_lock(tmp_path)
        assert 0.01 <= sum(waits) < 1

        def give_back(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                try_lock(other, "LOCK_UN")

        waits.clear()
        monkeypatch.setattr(lock.time, "sleep", give_back)
        with take_lock(tmp_path) as mine:
            assert not try_lock(other, "LOCK_SH")
        assert mine.closed
        assert len(waits) == 3


def test_a_folder_is_made_and_locked_and_one_of_something_else_refused(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with locked_folder(folder, "plan.json"), pytest.raises(StoreError, match="already running"):
        take_lock(folder)
    (folder / f"{TEMPORARY}plan.json").write_text("{")
    with locked_folder(folder, "plan.json"):  # what a kill leaves is nothing
        (folder / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="holds something else"), locked_folder(folder, "plan.json"):
        pass
    (folder / "plan.json").write_text("{}")
    with locked_folder(folder, "plan.json"):
        pass
    with pytest.raises(StoreError, match="cannot make the folder"), locked_folder(folder / "notes.txt", "plan.json"):
        pass
