"""How a command behaves in a terminal or a script."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import warnings

import pytest
import typer
from rich.console import Console
from rich.table import Table

from forkmerge.cli.terminal import interruptible, print_json, readable_warnings, say, stderr, stdout, stdout_for_json


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
