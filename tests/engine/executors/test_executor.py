"""The interface of executors: six methods, which ours keep in every promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forkmerge.engine.executors.executor import Executor
from forkmerge.engine.executors.process_executor import ProcessExecutor
from forkmerge.engine.executors.serial import SerialExecutor
from forkmerge.testing import check_executor


@pytest.mark.parametrize(
    "make_executor", [SerialExecutor, lambda: ProcessExecutor(1), lambda: ProcessExecutor(2)], ids=["serial", "1", "2"]
)
def test_an_executor_does_what_the_interface_promises(make_executor: Callable[[], Executor]) -> None:
    check_executor(make_executor)


def test_the_interface_has_six_methods() -> None:
    assert Executor.__abstractmethods__ == {"start", "put", "submit", "result", "fetch", "close"}


def test_an_executor_is_closed_with_its_block() -> None:
    closed = []

    class Closing(SerialExecutor):
        def close(self) -> None:
            closed.append(True)

    with pytest.raises(KeyError), Closing() as executor:
        raise KeyError(executor.workers)
    assert closed == [True]
