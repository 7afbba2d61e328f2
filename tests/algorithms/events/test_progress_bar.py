"""`fit` shows a bar to whoever is there to see it, and nothing elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import forkmerge as fm
from forkmerge.algorithms.events import Event, RunFinished
from forkmerge.algorithms.events.progress_bar import notebook_display
from paths import ROOT
from problems import fit

SCRIPT = """
import sys
import forkmerge as fm
from problems import fit

algorithm = fm.ForkMerge({"[red]": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 1.0}}, interval=300)
fit(algorithm, steps=600, progress=False)
print("printed to stdout", "rich" in sys.modules)
print("after silence", file=sys.stderr)
fit(algorithm, steps=600)
print("printed to stdout", "rich" in sys.modules)
"""


def run_script(*, terminal: bool) -> tuple[str, str]:
    """What a script writes to stdout, a pipe, and to stderr, a terminal or a pipe."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    environment |= {"TERM": "xterm", "COLUMNS": "150", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT]
    if not terminal:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout, done.stderr
    pty = pytest.importorskip("pty")  # which Windows lacks
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 65536):
                written += piece
        except OSError:  # how a terminal says that nobody writes any more
            pass
        assert process.stdout is not None
        printed = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0, written.decode()
    return printed, re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written.decode())


def test_a_terminal_shows_a_bar_where_one_is_wanted_and_what_is_printed_goes_where_it_was_sent() -> None:
    printed, shown = run_script(terminal=True)
    silence, _, bar = shown.partition("after silence")
    assert silence == ""
    assert re.search(r"search [12]/2  (\[red\]|joint)  step \d+/600", bar)
    assert "%" in bar
    assert printed.splitlines() == ["printed to stdout False", "printed to stdout True"]


def test_a_script_whose_stderr_is_piped_is_silent_and_loads_no_library_for_bars() -> None:
    printed, shown = run_script(terminal=False)
    assert shown == "after silence\n"
    assert printed.splitlines() == ["printed to stdout False"] * 2


def test_a_terminal_that_is_closed_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    seen: list[Event] = []

    def leave(event: Event) -> None:
        if not seen:
            os.close(ours)
        seen.append(event)

    with open(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", terminal)
        fit(on_event=leave)
        monkeypatch.undo()
    assert isinstance(seen[-1], RunFinished)


class Notebook:
    """As much of IPython as a notebook's bar needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, kernel: object = "a kernel") -> None:
        self.shown: list[str] = []
        display: Any = ModuleType("IPython.display")
        display.HTML, display.display = str, self._display
        package: Any = ModuleType("IPython")
        package.get_ipython = lambda: SimpleNamespace(kernel=kernel)
        package.display = display
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def _display(self, text: str, *, display_id: bool) -> SimpleNamespace:
        assert display_id
        self.shown.append(text)
        return SimpleNamespace(update=self.shown.append)


def test_a_notebook_shows_a_bar_as_html_without_obeying_names(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch)
    monkeypatch.setattr("forkmerge.algorithms.events.progress_bar._SECONDS_BETWEEN_UPDATES", 0.0)
    branches = {"<script>x": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 1.0}}
    fit(fm.ForkMerge(branches, interval=4))
    first, *_, last = notebook.shown
    assert first == "<div><progress></progress> starting</div>"
    assert '<progress value="1.000" max="1"></progress>' in last
    assert "100%" in last
    assert any("&lt;script&gt;" in text for text in notebook.shown)
    assert not any("<script" in text for text in notebook.shown)


def test_updates_of_a_notebook_are_rare_and_the_last_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch)
    monkeypatch.setattr("forkmerge.algorithms.events.progress_bar._SECONDS_BETWEEN_UPDATES", 1e9)
    fit()
    assert len(notebook.shown) == 2


def test_silence_is_silent_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch)
    fit(progress=False)
    assert notebook.shown == []


def test_a_shell_in_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    Notebook(monkeypatch, kernel=None)
    assert notebook_display() is None


def test_parts_of_a_composed_run_share_one_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notebook = Notebook(monkeypatch)
    monkeypatch.setattr("forkmerge.algorithms.events.progress_bar._SECONDS_BETWEEN_UPDATES", 1e9)
    fit(fm.PostTrain(), folder=tmp_path / "run")
    assert len(notebook.shown) == 2
