"""Kills and full disks at any change of the disk, for tests of what survives them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forkmerge.engine.storage import atomic_files
from forkmerge.errors import StoreError


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the library may catch it."""


class Faults:
    """Counts the changes of the disk and breaks the `at`-th of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.count, self.mode = -1, 0, "before"
        self.error: BaseException = Killed()
        for name in ("write", "_save_tensors", "_fsync", "_rename"):
            monkeypatch.setattr(atomic_files, name, self._wrapped(name, getattr(atomic_files, name)))

    def arm(self, at: int, mode: str, error: BaseException) -> None:
        self.at, self.count, self.mode, self.error = at, 0, mode, error

    def disarm(self) -> None:
        self.at = -1

    def _wrapped(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(first: Any, *rest: Any) -> None:
            self.count += 1
            if self.count != self.at:
                return real(first, *rest)
            if self.mode == "torn" and name == "write":
                real(first, rest[0][: len(rest[0]) // 2])
            elif self.mode == "after" or (self.mode == "torn" and name == "_save_tensors"):
                real(first, *rest)
                if self.mode == "torn":
                    os.truncate(first, os.path.getsize(first) // 2)
            raise self.error

        return call


def each_fault(faults: Faults, error: BaseException, action: Callable[[], None]) -> Iterator[int]:
    """Repeat `action`, breaking its first, second, … change of the disk until one run through is unbroken."""
    for at in range(1, 100):
        faults.arm(at, faults.mode, error)
        try:
            action()
        except (Killed, StoreError):
            faults.disarm()
            yield at
        else:
            assert at > 4, "the faults were never reached"
            return
