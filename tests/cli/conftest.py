"""What tests of commands share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import TINY


@pytest.fixture(autouse=True)
def terminal_signals() -> Iterator[None]:
    """Handlers of a program in a terminal: jobs in the background of a script ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A folder with a problem in it, as the current one; yields the problem's module."""
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("tiny", None)
    yield __import__("tiny")
    sys.modules.pop("tiny", None)
