"""Progress as a bar, in a terminal or in a notebook; rich and IPython are imported only where there is one to show."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forkmerge.algorithms.events.progress import ProgressView
from forkmerge.algorithms.events.run_events import Event, OnEvent
from forkmerge.engine.executors.lost_output import tolerant
from forkmerge.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

_SECONDS_BETWEEN_UPDATES = 0.2  # of a notebook: every one is a message


@contextmanager
def shown(view: ProgressView) -> Iterator[OnEvent]:
    """Yield what shows a bar to whoever is there: in a notebook, on a terminal, or nobody."""
    display = notebook_display()
    if display is not None:
        bar = _NotebookBar(display, view)
        try:
            yield bar
        finally:
            bar.update()
    elif sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console

        with terminal_bar(Console(file=tolerant(sys.stderr)), view) as show:
            yield show
    else:
        yield lambda event: None


def notebook_display() -> ModuleType | None:
    """Return the module that shows things in the notebook that this is; None where it is none."""
    ipython = sys.modules.get("IPython")  # which a notebook has imported
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:  # the shell in a terminal has none
        return None
    return import_module("IPython.display")


@contextmanager
def terminal_bar(
    console: Console, view: ProgressView, say: Callable[[str], None] = lambda text: None
) -> Iterator[OnEvent]:
    """Yield what shows a bar, which is gone in the end.

    Args:
        console: The terminal.
        view: What is shown.
        say: Prints the lines that events deserve above the bar.
    """
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[left]}"),
    )
    # What is printed meanwhile must go above the bar, but not if it goes to a file.
    is_shared = sys.stdout is not None and sys.stdout.isatty()
    with RichProgress(*columns, console=console, transient=True, redirect_stdout=is_shared) as bar:
        yield _TerminalBar(bar, view, say)


class _TerminalBar:
    """A bar with the time left, and the lines that events deserve above it."""

    def __init__(self, bar: RichProgress, view: ProgressView, say: Callable[[str], None]) -> None:
        self.bar, self.view, self.say = bar, view, say
        self.task = bar.add_task("starting", total=None, left="")

    def __call__(self, event: Event) -> None:
        from rich.markup import escape

        text = self.view(event)
        if text is not None:
            self.say(text)
        share, left = self.view.progress.share, self.view.progress.time_left
        total = None if share is None else 1.0
        self.bar.update(
            self.task, description=escape(printable(self.view.line)), completed=share or 0.0, total=total, left=left
        )


class _NotebookBar:
    """The same as one line of HTML, which a cell shows and which is changed there."""

    def __init__(self, display: Any, view: ProgressView) -> None:
        self.html, self.view = display.HTML, view
        self.handle = display.display(self.html(self.text), display_id=True)
        self._updated = view.progress.clock()

    @property
    def text(self) -> str:
        """The line."""
        share, left = self.view.progress.share, self.view.progress.time_left
        bar = "<progress></progress>" if share is None else f'<progress value="{share:.3f}" max="1"></progress>'
        percent = "" if share is None else f"{share:.0%}"
        words = (html.escape(printable(self.view.line)), percent, left)
        return f"<div>{bar} {'&ensp;'.join(word for word in words if word)}</div>"

    def __call__(self, event: Event) -> None:
        self.view(event)
        if self.view.progress.clock() - self._updated >= _SECONDS_BETWEEN_UPDATES:
            self.update()

    def update(self) -> None:
        """Show where the work stands."""
        self._updated = self.view.progress.clock()
        self.handle.update(self.html(self.text))
