"""A team of worker processes: what goes wrong in one of them, also while it starts, is told where it is awaited."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.engine.executors import shared_memory, worker_team
from forkmerge.engine.executors.executor import Tell, WorkerError
from forkmerge.engine.executors.shared_memory import Memory
from forkmerge.engine.executors.worker_team import Team, WorkerEvent
from problems import SGD, TASKS, evaluation, examples, plain_net, shared_losses, shared_problem


class TwoArguments(Exception):
    """Cannot be rebuilt from its message, so it does not survive a pickle."""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)


def raising(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
    if context.step > 0:
        raise TwoArguments("label out of range", "stream t")
    return shared_losses(model, batch, tasks, context)


def test_an_exception_in_a_worker_arrives_with_its_traceback() -> None:
    stream = fm.Stream(TensorDataset(*examples(16, 1)), raising, TASKS, 8)
    problem = fm.Problem("tgt", stream, evaluation())
    with pytest.raises(WorkerError, match=r"(?s)Traceback.*TwoArguments: label out of range"):
        fm.ForkMerge("mixed").fit(problem, model=plain_net, optimizer=SGD, steps=4, workers=2, threads=1)


def end_at_once(index: int) -> Any:
    os._exit(3)


def test_a_second_start_has_what_the_first_left_of_the_time() -> None:
    team = Team(1)
    first = team.workers[0]
    try:
        team.start(end_at_once)
        with pytest.raises(fm.ProblemError, match="could not start: it ended with exit code 3"):
            team.events()
        assert team.workers[0] is not first
        assert team.workers[0].since == first.since
    finally:
        team.close()
        team.close()  # once more does no harm


def test_what_does_the_jobs_must_pickle() -> None:
    team = Team(0)
    with pytest.raises(fm.ProblemError, match=r"worker processes need .* that pickle.*workers=1"):
        team.start(lambda index: index)  # type: ignore[arg-type, return-value]


@contextmanager
def few_files(more: int) -> Iterator[None]:
    """Let this process open only so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    listed = os.listdir("/proc/self/fd")
    used = {int(name) for name in listed if os.path.lexists(f"/proc/self/fd/{name}")}  # that of the list is closed
    free = [number for number in range(len(used) + more + 1) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Fail instead of waiting for ever."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError(f"nothing happened for {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def make_odd(index: int) -> Any:
    return odd_answer


def odd_answer(job: Any, memories: list[Memory], tell: Tell) -> tuple[Any, list[Memory]]:
    if job == "many files":
        return "made", [Memory(64) for _ in range(40)]
    if job == "unreadable":
        return _Unreadable(), []
    if job == "out of files":
        with few_files(0):
            Memory(64)
    return job, []


class _Unreadable:
    """Comes back as something that cannot be rebuilt."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def next_events(team: Team, job: Any = None) -> list[WorkerEvent]:
    """Wait for a worker, give it a job, and return what comes of it."""
    with at_most(60):
        while not team.free():
            team.events()
        if job is not None:
            team.free()[0].begin(job, job)
        while not (events := team.events()):
            pass
        return events


@pytest.fixture
def team() -> Iterator[Team]:
    team = Team(1)
    try:
        team.start(make_odd)
        yield team
    finally:
        team.close()


class TestShortages:
    """A worker that lives is not taken for dead, and what cannot be received is not waited for."""

    def test_no_file_left_for_an_answer_is_one_clear_error(self, team: Team) -> None:
        while not team.free():
            team.events()
        with (
            few_files(6),
            pytest.raises(fm.ResourceError, match=r"answer cannot be received: too many open.*ulimit -n"),
        ):
            next_events(team, "many files")

    def test_no_file_left_to_hand_over_a_job_is_one_clear_error(self, team: Team) -> None:
        while not team.free():
            team.events()
        with few_files(0), pytest.raises(fm.ResourceError, match="cannot be told what to do: too many open files"):
            next_events(team, "anything")

    def test_a_live_worker_whose_answer_cannot_be_read_is_replaced(self, team: Team) -> None:
        (event,) = next_events(team, "unreadable")
        assert event.kind == "died"
        assert "an answer that cannot be read (invalid literal" in event.value
        (event,) = next_events(team, "again")
        assert (event.kind, event.value) == ("done", "again")

    def test_a_worker_that_has_too_little_says_so_and_is_replaced(self, team: Team) -> None:
        (event,) = next_events(team, "out of files")
        assert event.kind == "died"
        assert "too many open files" in event.value
        (event,) = next_events(team, "again")
        assert (event.kind, event.value) == ("done", "again")


class TestStartingFewer:
    def test_workers_that_cannot_be_started_are_done_without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begin = worker_team.Worker.__init__

        def first_only(worker: worker_team.Worker, index: int) -> None:
            if index:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            begin(worker, index)

        monkeypatch.setattr(worker_team.Worker, "__init__", first_only)
        with pytest.warns(UserWarning, match=r"missing: it cannot be started.*ulimit -u.*Going on with 1 worker;"):
            run = fm.ForkMerge("mixed").fit(
                shared_problem(), model=plain_net, optimizer=SGD, steps=4, workers=2, threads=1
            )
        assert run.steps == 4

    def test_no_worker_at_all_is_one_clear_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def none(worker: worker_team.Worker, index: int) -> None:
            raise MemoryError

        monkeypatch.setattr(worker_team.Worker, "__init__", none)
        with pytest.raises(fm.ResourceError, match="no worker process can be started: cannot allocate memory"):
            Team(2)

    def test_pipes_of_a_process_that_cannot_be_started_are_closed(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with few_files(3), pytest.raises(fm.ResourceError, match="no worker process can be started: too many open"):
            Team(1)
        assert len(os.listdir("/proc/self/fd")) == before


def test_names_of_a_notebook_are_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_can_import_main", lambda: False)
    monkeypatch.setattr(make_odd, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "make_odd", make_odd, raising=False)
    with pytest.raises(
        fm.ProblemError, match=r"^make_odd: defined in a notebook .* my_problem.py, .* or use workers=1"
    ):
        Team(0).start(make_odd)
