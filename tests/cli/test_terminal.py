"""How a command behaves in a terminal or a script."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from rich.console import Console
from rich.table import Table

from command_line import TINY
from forkmerge.cli import main
from forkmerge.cli.terminal import (
    ends_once,
    interruptible,
    print_json,
    readable_warnings,
    say,
    stderr,
    stdout,
    stdout_for_json,
)
from forkmerge.engine.storage.run_folder import status
from forkmerge.engine.training import interrupts


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("stop", "code"), [(interrupt, 130), (terminate, 143)])
def test_an_interrupt_says_how_to_go_on_and_gives_the_shell_its_code(stop, code):
    text, before = io.StringIO(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as caught, interruptible(Console(file=text), lambda: "go on with [x]"):
        stop()
    assert caught.value.exit_code == code
    assert text.getvalue() == "go on with [x]\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_before_anything_was_written_there_is_nothing_to_go_on_with():
    text = io.StringIO()
    with pytest.raises(typer.Exit), interruptible(Console(file=text), lambda: None):
        interrupt()
    assert text.getvalue() == "interrupted before anything was written.\n"


@pytest.mark.filterwarnings("always::UserWarning")  # elsewhere in the suite they are errors
def test_warnings_are_one_line_without_code():
    text, before = io.StringIO(), warnings.showwarning
    with readable_warnings(Console(file=text)):
        warnings.warn("[bold] is not markup", stacklevel=1)
    assert text.getvalue() == "warning: [bold] is not markup\n"
    assert warnings.showwarning is before


@pytest.mark.parametrize("as_json", [False, True])
def test_standard_output_is_kept_for_json(as_json, capsys):
    with stdout_for_json(as_json):
        print("from the user's code")
    print("after it")
    shown = capsys.readouterr()
    assert ("from the user's code" in shown.err) == as_json
    assert "after it" in shown.out


def test_json_is_strict_and_keeps_letters(capsys):
    print_json({"Δ": float("nan"), "list": (1, 2)})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"Δ": None, "list": [1, 2]}
    assert "Δ" in printed


def test_text_is_printed_as_it_is_and_never_folded():
    text = io.StringIO()
    say(Console(file=text, width=20), "[red] " + "x" * 50)
    assert text.getvalue() == "[red] " + "x" * 50 + "\n"


def test_nothing_that_is_printed_is_obeyed_alone_in_tables_or_as_json(capsys):
    hostile = "\x1b]0;title\x07\x1b[2J\x9b31m"
    code = r"\u001b]0;title\u0007\u001b[2J\u009b31m"
    for console in (stdout(), stderr()):
        say(console, hostile)
        table = Table(hostile, title=hostile)
        table.add_row(hostile)
        console.print(table)
    print_json({hostile: hostile})
    shown = capsys.readouterr()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown.out + shown.err)
    for text in (shown.out, shown.err):
        assert text.count(code) >= 4, text
    assert json.loads(shown.out[shown.out.rindex("{") :]) == {hostile: hostile}


@pytest.mark.parametrize("workers", [1, 2])
def test_five_interrupts_in_a_row_end_a_run_without_a_traceback_and_it_resumes(workers: int, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    words = ["run", "tiny:recipe", "--out", "run", "--steps", "1000000", "--workers", str(workers)]
    started = subprocess.Popen(
        [sys.executable, "-m", "forkmerge.cli", *words, "--set", "training.threads=1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        record = tmp_path / "run" / "record.jsonl"
        until = time.monotonic() + 120
        while (not record.exists() or not record.stat().st_size) and time.monotonic() < until:
            time.sleep(0.05)
        for _ in range(5):
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGINT)  # as a terminal does, to workers, too
            time.sleep(0.03)
        output, _ = started.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 130, output
    assert "Traceback" not in output
    assert "KeyboardInterrupt" not in output
    assert "resume run" in output
    assert status(tmp_path / "run") == "interrupted"


def test_an_interrupt_while_the_first_modules_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "forkmerge.engine.executors.lost_output", Interrupted())
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 130
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN, "a second one would be a traceback"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_that_does_not_end_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[int]()
    monkeypatch.setattr(os, "_exit", ended.append)
    handler = interrupts.InterruptOnce()
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGINT, None)
    handler(signal.SIGINT, None)
    assert not ended
    monkeypatch.setattr(interrupts, "_PATIENCE", -1.0)
    handler(signal.SIGINT, None)
    assert ended == [130]


def test_the_handler_of_ctrl_c_is_the_program_s_while_it_runs() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with ends_once():
            assert isinstance(signal.getsignal(signal.SIGINT), interrupts.InterruptOnce)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(SystemExit) as caught, ends_once():
            signal.raise_signal(signal.SIGINT)
        assert caught.value.code == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with ends_once():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "what somebody else has set stays"
    finally:
        signal.signal(signal.SIGINT, before)
