"""Who gets the events of a run: the bar that `fit` shows, and the user's callback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from forkmerge.algorithms.events.progress_bar import shown
from forkmerge.algorithms.events.run_events import Event, OnEvent
from forkmerge.algorithms.events.run_progress import RunView
from forkmerge.errors import ProblemError, add_fact, facts_of


def ignore(event: Event) -> None:
    """Do nothing with an event."""


def check_callback(on_event: object) -> None:
    """Refuse what cannot be called with events."""
    if not callable(on_event):
        raise ProblemError(f"on_event must be a function of one event, got {on_event!r:.80}.")


@contextmanager
def sending(on_event: OnEvent, *, progress: bool) -> Iterator[OnEvent]:
    """Yield what to call with every event.

    Args:
        on_event: The user's callback; what it raises is the user's own, and said to be.
        progress: Whether a bar is shown, where there is somebody to see it.
    """
    check_callback(on_event)
    with shown(RunView()) if progress else _unseen() as show:

        def send(event: Event) -> None:
            show(event)
            call(on_event, event)

        yield send


@contextmanager
def _unseen() -> Iterator[OnEvent]:
    yield ignore


def call(on_event: OnEvent, event: Event) -> None:
    """Call a callback; its own errors say that they are."""
    try:
        on_event(event)
    except Exception as error:
        text = f"raised by on_event, which was called with {type(event).__name__}; the run itself was in order"
        if not any("raised by on_event" in fact for fact in facts_of(error)):
            add_fact(error, text)
        raise


def in_part(name: str, on_event: OnEvent) -> OnEvent:
    """Return the callback for a part of a run, whose events then say which part they are of."""
    return lambda event: on_event(replace(event, part=f"{name}/{event.part}" if event.part else name))
