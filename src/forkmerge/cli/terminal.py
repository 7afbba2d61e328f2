"""How a command behaves in a terminal or a script: where things are printed, and what an interrupt does."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from forkmerge.engine.training.interrupts import InterruptOnce, Terminated, terminate
from forkmerge.errors import printable


@contextmanager
def ends_once() -> Iterator[None]:
    """Let Ctrl-C end this program once, without a traceback, however often it is pressed."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # such as that of `nohup`
        yield
        return
    handler = InterruptOnce()
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    except KeyboardInterrupt:  # before any command has begun
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        # Python forgets handlers of its own while it ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN if handler.first is not None else signal.default_int_handler)


@contextmanager
def interruptible(console: Console, how_to_go_on: Callable[[], str | None]) -> Iterator[None]:
    """End cleanly on Ctrl-C and SIGTERM, saying how to go on; None says that nothing was written."""
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
        say(console, how_to_go_on() or "interrupted before anything was written.", style="yellow")
        raise typer.Exit(128 + number) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def readable_warnings(console: Console) -> Iterator[None]:
    """Show Python's warnings as one line each, without the line of code they come from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(console, f"warning: {message}", style="yellow")
        yield


@contextmanager
def stdout_for_json(as_json: bool) -> Iterator[None]:
    """Send what the user's code prints to standard error, where standard output is promised to be JSON."""
    if not as_json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


class _SafeConsole(Console):
    """A console that obeys nothing in what it prints: names and notes may come from anywhere."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text as it is printed, alone or in a table."""
        return super().render_str(printable(text), **options)


def stdout() -> Console:
    """Return the console that results go to."""
    # What is not a terminal has no width to fold tables to.
    return _SafeConsole(width=None if sys.stdout.isatty() else 200)


def stderr() -> Console:
    """Return the console that progress, warnings and errors go to."""
    return _SafeConsole(stderr=True)


def can_ask() -> bool:
    """Whether somebody sits at a terminal who can answer a question."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def print_json(value: Any) -> None:
    """Print plain data as strict JSON."""
    from forkmerge.engine.storage.json_codec import plain  # here, since it imports torch, which help does without

    typer.echo(printable(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)))


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: names may hold what rich would take for markup, and paths must stay whole."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
