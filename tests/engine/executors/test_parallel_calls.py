"""Calls in processes: a failure or a death is that call's own, and the order of results does not matter."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

import forkmerge as fm
from forkmerge.engine.executors.devices import own_index
from forkmerge.engine.executors.executor import Tell
from forkmerge.engine.executors.parallel_calls import Failure, describe_error, run_calls, using_threads


def work(job: int, tell: Tell) -> tuple[int, int]:
    """Say something, then square, fail or die."""
    tell(f"at {job}")
    if job == 2:
        raise fm.ProblemError("two is\nnot possible.")
    if job == 3:
        raise KeyError("three")
    if job == 4 and threading.current_thread() is threading.main_thread() and os.environ.get("MAY_DIE") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    print("what calls print is not a result")
    return job * job, os.getpid()


def where(job: int, tell: Tell) -> tuple[int, int]:
    return own_index(), os.getpid()


def collect(jobs: list[int], workers: int) -> tuple[dict[int, Any], list[tuple[int, Any]]]:
    news: list[tuple[int, Any]] = []
    results = dict(run_calls(work, jobs, workers, lambda index, value: news.append((index, value))))
    return results, news


def test_processes_end_every_job_whatever_the_others_do(monkeypatch, capfd):
    monkeypatch.setenv("MAY_DIE", "1")
    results, news = collect([1, 2, 3, 4, 5, 6], 2)
    assert sorted(results) == [0, 1, 2, 3, 4, 5]
    assert [results[index][0] for index in (0, 4, 5)] == [1, 25, 36]
    assert all(results[index][1] != os.getpid() for index in (0, 4, 5))
    assert results[1].error == "two is not possible."
    assert results[2].error == "KeyError: 'three'"
    assert "in work" in results[2].details
    assert results[3].error == "it ended 3 processes, the last with SIGKILL (out of memory?)"
    for index, job in enumerate([1, 2, 3, 4, 5, 6]):
        calls = 3 if job == 4 else 1  # what its process did not survive is tried again
        assert [value for i, value in news if i == index] == [None, f"at {job}"] * calls
    assert capfd.readouterr().out == ""


def test_a_process_knows_its_position():
    processes = set(dict(run_calls(where, [0] * 8, 2)).values())
    assert {index for index, _ in processes} <= {0, 1}
    assert len({index for index, _ in processes}) == len({process for _, process in processes})
    assert own_index() == 0


def test_one_worker_calls_here_one_after_the_other():
    results, news = collect([1, 2, 5], 1)
    assert results[0] == (1, os.getpid())
    assert results[2] == (25, os.getpid())
    assert isinstance(results[1], Failure)
    assert news == [(0, None), (0, "at 1"), (1, None), (1, "at 2"), (2, None), (2, "at 5")]


def test_an_interrupt_is_no_failure_of_a_call():
    def interrupted(job: int, tell: Tell) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_calls(interrupted, [1], 1))


def test_errors_are_one_line():
    assert describe_error(ValueError("a\n  b")) == "ValueError: a b"
    assert describe_error(ValueError()) == "ValueError"


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with using_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def nested(job: int, tell: Tell) -> tuple[int, int]:
    """Make a call inside a call, where this process is the only worker."""
    before = own_index()
    ((_, (inside, _)),) = run_calls(where, [0], 1)
    return before, inside


def test_a_call_inside_a_call_keeps_the_position_of_its_process():
    assert all(before == inside for before, inside in dict(run_calls(nested, [0] * 6, 2)).values())


def make_unpicklable(job: int, tell: Tell) -> object:
    return lambda: job


def test_a_result_that_cannot_be_sent_is_a_failure_of_its_call_alone():
    results = dict(run_calls(make_unpicklable, [1, 2], 2))
    assert all(result.error.startswith("its result could not be sent: ") for result in results.values())
    assert all("Traceback" in result.details for result in results.values())
