"""Progress as the command shows it: a bar with lines above it on a terminal, lines alone elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from forkmerge.algorithms.events.progress import ProgressView
from forkmerge.algorithms.events.progress_bar import terminal_bar
from forkmerge.algorithms.events.run_events import Event, OnEvent
from forkmerge.cli.terminal import say


@contextmanager
def watching(console: Console, view: ProgressView) -> Iterator[OnEvent]:
    """Yield the callback that shows progress on a console."""
    if not console.is_terminal:
        yield _Lines(console, view)
        return
    with terminal_bar(console, view, lambda text: say(console, text)) as show:
        yield show


class _Lines:
    """Plain lines: those that events deserve, and now and then where the work stands."""

    def __init__(self, console: Console, view: ProgressView) -> None:
        self.console, self.view = console, view
        self._shown = view.progress.clock()

    def __call__(self, event: Event) -> None:
        text, now = self.view(event), self.view.progress.clock()
        left = self.view.progress.time_left
        if text is None and left and now - self._shown >= self.view.seconds_between_lines:
            text = f"{self.view.line}  {left}"
        if text is not None:
            self._shown = now
            say(self.console, text)
