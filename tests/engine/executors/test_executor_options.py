"""What `fit` is told about its executor: one way to say it, and clear words where there are two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import forkmerge as fm
from forkmerge.engine.executors.executor_options import LocalOptions, executor_options
from forkmerge.engine.executors.serial import SerialExecutor
from problems import fit


def test_a_number_of_workers_is_a_number_of_local_processes() -> None:
    assert executor_options(None) == LocalOptions(1)
    assert executor_options(None, 3) == LocalOptions(3)
    assert executor_options(None, devices=["cpu", "cpu"]) == LocalOptions(2, (torch.device("cpu"),) * 2)


def test_one_worker_is_this_process_however_many_there_could_be() -> None:
    assert isinstance(LocalOptions(1).open(), SerialExecutor)
    assert isinstance(LocalOptions(4).open(1), SerialExecutor)


def test_local_workers_share_the_threads() -> None:
    assert LocalOptions(4).threads == 1
    assert LocalOptions(1).threads == torch.get_num_threads()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": LocalOptions(2), "workers": 2}, r"workers and an executor are given: say it there"),
        ({"executor": LocalOptions(2), "devices": ["cpu"]}, r"devices and an executor are given: say it there"),
        ({"executor": "ray"}, r"executor must be options such as Ray\(workers=4\), got 'ray'"),
        ({"workers": 0}, r"workers must be a positive integer, got 0"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        fit(**options)


def test_more_workers_than_any_machine_can_hold_are_refused_before_one_starts() -> None:
    with pytest.raises(fm.ProblemError, match=r"workers must be at most \d+, got 100000: this machine has"):
        executor_options(None, 100_000)
    with pytest.raises(fm.ProblemError, match=r"workers must be at most \d+, got 100000: this machine has"):
        replace(LocalOptions(2), workers=100_000)  # as the command line changes a recipe's table
    with pytest.raises(fm.ProblemError, match="workers must be a positive integer, got 'x'"):
        LocalOptions("x")  # type: ignore[arg-type]
