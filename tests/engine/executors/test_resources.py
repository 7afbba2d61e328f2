"""What worker processes need: counted before training, and one clear error where the machine has no more of it."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forkmerge as fm
from forkmerge.algorithms import settings
from forkmerge.engine.executors import resources
from forkmerge.engine.executors.resources import check_descriptors, is_shortage, shortage
from problems import ADAM, fit, problem_with, shared_losses


@pytest.fixture
def limit_of_100() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_open_files_are_counted_before_training(limit_of_100: None, tmp_path: Path) -> None:
    with pytest.raises(fm.ProblemError, match=r"2 branches .* may have 100: type ulimit -n 128 first, or .*workers=1"):
        fit(workers=2, optimizer=ADAM, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    fit(workers=1, optimizer=ADAM)


def test_what_is_advised_is_enough(limit_of_100: None) -> None:
    with pytest.raises(fm.ProblemError) as error:
        check_descriptors(3, 20, 4)
    (advised,) = re.findall(r"ulimit -n (\d+)", str(error.value))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(advised), hard))
    check_descriptors(3, 20, 4)


class Watched:
    """Counts the open files of the process that computes the losses, in a file by its pid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
        self.count()
        return shared_losses(model, batch, tasks, context)

    def count(self) -> None:
        file, now = self.folder / str(os.getpid()), len(os.listdir("/proc/self/fd"))
        if not file.exists() or int(file.read_text()) < now:
            file.write_text(str(now))


def test_no_process_opens_more_files_than_were_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def note(*sizes: int) -> None:
        monkeypatch.setattr(resources, "_MORE", 0)
        with monkeypatch.context() as patch:
            patch.setattr(resource, "getrlimit", lambda which: (1, 1))
            with pytest.raises(fm.ProblemError) as error:
                check_descriptors(*sizes)
        counted.extend(map(int, re.findall(r"up to (\d+) open files", str(error.value))))

    monkeypatch.setattr(settings, "check_descriptors", note)
    watched, before = Watched(tmp_path), len(os.listdir("/proc/self/fd"))
    branches = {f"b{index}": {"tgt": 1.0, "aux": index / 10} for index in range(10)}
    algorithm = fm.ForkMerge(branches, interval=4, floor=True, optimizer_state="average")
    fit(algorithm, problem_with(watched), optimizer=ADAM, workers=2, on_event=lambda event: watched.count())
    most = {int(file.name): int(file.read_text()) for file in tmp_path.iterdir()}
    assert len(most) in (2, 3)  # on a busy machine one worker may do all before the other has come up
    here = most.pop(os.getpid()) - before
    assert 10 * 3 < here <= counted[0]
    assert max(most.values()) <= counted[0] + 20  # a process has some files anyway


def test_a_shortage_says_what_to_do() -> None:
    errors = [OSError(errno.ENOMEM, "x"), MemoryError(), OSError(errno.EAGAIN, "x"), OSError(errno.EMFILE, "x")]
    assert all(map(is_shortage, errors))
    assert not is_shortage(OSError(errno.ENOENT, "x"))
    assert not is_shortage(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(1 << 50, dtype=torch.uint8)
    errors += [torchs.value, torch.OutOfMemoryError("CUDA out of memory.")]
    assert all(map(is_shortage, errors))
    texts = [str(shortage("it failed", error)) for error in errors]
    assert (
        texts[0]
        == texts[1]
        == texts[-2]
        == texts[-1]
        == "it failed: cannot allocate memory. Free some memory, or use fewer workers."
    )
    assert "ulimit -u" in texts[2]
    assert "ulimit -n" in texts[3]
    assert shortage("again", shortage("it failed", errors[0])).args == (texts[0],)
