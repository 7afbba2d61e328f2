"""Events are frozen, documented, and travel between processes."""

from __future__ import annotations

import inspect
import pickle
import re
from dataclasses import FrozenInstanceError, fields

import pytest

from forkmerge.algorithms import events
from forkmerge.algorithms.events import Event, Notice, StepProgress
from forkmerge.algorithms.events.run_events import InPhase, record_line

KINDS = [kind for kind in vars(events).values() if inspect.isclass(kind) and issubclass(kind, Event)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_documented(kind: type[Event]) -> None:
    inherited = {item.name for base in kind.__mro__[1:] if issubclass(base, Event) for item in fields(base)}
    own = [item.name for item in fields(kind) if item.name not in inherited]
    assert re.findall(r"^    +(\w+): ", kind.__doc__ or "", re.M) == own


def test_they_are_frozen_and_travel() -> None:
    event = StepProgress(phase="search", round=1, step=3, branch="joint", losses={"ctr": 0.5})
    assert pickle.loads(pickle.dumps(event)) == event
    with pytest.raises(FrozenInstanceError):
        event.step = 4  # type: ignore[misc]


def test_the_record_has_no_use_for_what_only_an_observer_needs() -> None:
    assert record_line(Notice(text="odd")) is None
    assert record_line(InPhase(phase="search", round=1, step=0)) is None
