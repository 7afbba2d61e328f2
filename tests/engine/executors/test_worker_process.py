"""A worker process: it hears no Ctrl-C while it starts, prints to standard error, and sends every error as text."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from forkmerge.engine.executors.executor import Tell
from forkmerge.engine.executors.shared_memory import Memory
from forkmerge.engine.executors.worker_team import Team, WorkerEvent


class Unusual(Exception):
    """Cannot be rebuilt from its message, so it would not survive the way back."""

    def __init__(self, text: str, more: str) -> None:
        super().__init__(text)


def make(index: int) -> Any:
    return answer


def answer(job: str, memories: list[Memory], tell: Tell) -> tuple[Any, list[Memory]]:
    print("not a result")
    if job == "raise":
        raise Unusual("of the user's", "own")
    tell("half done")
    return job.upper(), []


def events_of(team: Team, job: str) -> list[WorkerEvent]:
    while not team.free():
        team.events()
    team.free()[0].begin(job, job)
    events: list[WorkerEvent] = []
    while not any(event.kind in ("done", "failed", "died") for event in events):
        events += team.events()
    return events


def test_jobs_are_done_one_after_the_other_and_an_error_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    team = Team(1)
    try:
        os.kill(team.workers[0].process.pid or 0, signal.SIGINT)  # long before it can have imported anything
        team.start(make)
        first = team.workers[0]
        assert [(event.kind, event.value) for event in events_of(team, "a")] == [("news", "half done"), ("done", "A")]
        (failed,) = events_of(team, "raise")
        assert failed.kind == "failed"
        assert "test_worker_process.py" in failed.value
        assert "Unusual: of the user's" in failed.value
        assert "src/forkmerge/" not in failed.value
        assert [event.value for event in events_of(team, "b")] == ["half done", "B"]
        assert team.workers == [first], "no process has died of any of this"
    finally:
        team.close()
    printed = capfd.readouterr()
    assert "not a result" in printed.err
    assert printed.out == ""
    assert "KeyboardInterrupt" not in printed.err
