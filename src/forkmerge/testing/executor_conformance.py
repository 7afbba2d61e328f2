"""What every executor must do: call `check_executor` in your own tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forkmerge.engine.executors.executor import Answer, Executor, Inputs, Tell, WorkerLost
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError
from forkmerge.testing.small_training import same_state, train_small

STEPS = 5


class CheckWorker:
    """A worker whose calls show what the executor does with them: `(what, value)`.

    Args:
        index: Its position.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, payload: tuple[str, Any], inputs: Inputs, tell: Tell) -> Answer:
        """Train so many steps, add states up, give the value back, or its own index, raise, or end the process."""
        what, value = payload
        if what == "train":
            result = train_small(None, cuts=(0, value), state=inputs.take())
            return Answer(result.losses, result.state)
        if what == "add":
            return Answer(_weighted_sums(inputs.read(), inputs.scratch()))
        for word in ("first", "second"):
            tell((word, value))
        if what == "raise":
            raise ValueError(f"no {value} here")
        if what == "end":
            for row in inputs.take().rows.values():
                row.fill_(torch.nan)  # what a worker leaves behind must not matter
            os._exit(9)
        return Answer(self.index if what == "index" else value)


class _Unsendable:
    """Makes workers, but cannot be sent to where they are, by no kind of pickle."""

    def __call__(self, index: int) -> CheckWorker:
        return CheckWorker(index)

    def __reduce__(self) -> Any:
        raise TypeError("it holds what belongs to one process")


def check_executor(make_executor: Callable[[], Executor]) -> None:
    """Check that an executor does all that its interface promises, with the bits of a serial run.

    Args:
        make_executor: Makes it, not started yet; called twice.

    Raises:
        AssertionError: It does not; the message says what it should have done.
    """
    with make_executor() as executor:
        executor.start(CheckWorker)
        for check in (_check_data, _check_order, _check_states, _check_readers, _check_errors):
            check(executor)
        if not executor.runs_here:
            _check_losses(executor)
        executor.close()  # once more follows
    if not executor.runs_here:
        with make_executor() as executor:
            error = _raised(lambda: executor.start(_Unsendable()))
            assert isinstance(error, ProblemError), f"start must refuse what does not pickle, not raise {error!r}"


def _check_data(executor: Executor) -> None:
    handles = {value: executor.submit(("echo", value), name=f"echo {value}") for value in range(4)}
    for value, handle in reversed(handles.items()):
        data = executor.result(handle)
        assert data == value, f"result must give the data of the call that was asked for, {value}, not {data!r}"
        assert handle.name == f"echo {value}", f"a handle must carry the name of its call, not {handle.name!r}"
    indices = {executor.result(executor.submit(("index", None))) for _ in range(4)}
    assert indices <= set(range(executor.workers)), f"workers must be made with indices from 0, not {indices}"


def _check_order(executor: Executor) -> None:
    notes: dict[int, list[Any]] = {value: [] for value in range(4)}
    waiting = [executor.submit(("echo", value), note=each.append) for value, each in notes.items()]
    values = []
    while waiting:
        handle = executor.first_done(waiting)
        assert handle in waiting, "first_done must return one of the handles"
        waiting.remove(handle)
        values.append(executor.result(handle))
    assert sorted(values) == list(notes), f"first_done must return every call in its turn, not {values}"
    for value, told in notes.items():
        expected = [None, ("first", value), ("second", value)]
        assert told == expected, f"notes must be None and then what the call told, in order: {expected}, not {told}"


def _check_states(executor: Executor) -> None:
    ends = {steps: train_small(None, cuts=(0, steps)) for steps in (STEPS, 2)}
    states = {steps: _initial() for steps in ends}
    first = executor.submit(("train", 2), [executor.put(states[STEPS])])
    handles = {
        STEPS: executor.submit(("train", STEPS - 2), [first]),
        2: executor.submit(("train", 2), [executor.put(states[2])]),
    }
    for steps, handle in handles.items():
        executor.result(handle)
        executor.fetch(handle, states[steps])
        right = same_state(states[steps], ends[steps].state)
        assert right, f"{steps} steps, cut or not, must end with the bits of a serial run, in all fields of the state"
    assert executor.result(first) == ends[2].losses, "the data of a call must outlast calls that start where it ended"
    handle, other = executor.submit(("train", STEPS - 2), [executor.put(states[2])]), State(0, {})
    executor.result(handle)
    executor.fetch(handle, other)
    assert same_state(other, ends[STEPS].state), "fetch must make any state the one with which the call ended"


def _check_readers(executor: Executor) -> None:
    states = [train_small(None, cuts=(0, steps)).state for steps in (1, 2, 3)]
    copies = [state.clone() for state in states]
    handles = [executor.put(state) for state in states]
    calls = [executor.submit(("add", None), handles[start:]) for start in (0, 1, 0)]
    for start, call in zip((0, 1, 0), calls, strict=True):
        sums = _weighted_sums(copies[start:], copies[0].clone())
        assert executor.result(call) == sums, "several calls may read the same states, in the order of the handles"
    unchanged = all(same_state(state, copy) for state, copy in zip(states, copies, strict=True))
    assert unchanged, "states that calls only read must stay as they are"


def _check_errors(executor: Executor) -> None:
    failed = executor.submit(("raise", "label"), [], name="the call that raises")
    waits = executor.submit(("train", 1), [failed])
    error = _raised(lambda: executor.result(failed))
    assert "no label here" in str(error), f"result must raise what the call raised, not {error!r}"
    assert _raised(lambda: executor.result(waits)) is not None, "a call must fail with its input"
    assert executor.result(executor.submit(("echo", 1))) == 1, "workers must go on after a call that raised"


def _check_losses(executor: Executor) -> None:
    state = _initial()
    start = executor.put(state)
    lost = executor.submit(("end", None), [start], name="the call that ends its worker")
    waits, other = executor.submit(("train", 1), [lost]), executor.submit(("echo", 1))
    for handle in (lost, waits):
        error = _raised(lambda handle=handle: executor.result(handle))  # type: ignore[misc]  # bound now
        assert isinstance(error, WorkerLost), f"a call whose worker is gone must raise WorkerLost, not {error!r}"
        assert error.handle is lost, f"WorkerLost must name the call to make again, not {error.handle.name!r}"
    assert executor.result(other) == 1, "other calls must not be lost"
    again = executor.submit(("train", STEPS), [start])
    executor.result(again)
    executor.fetch(again, state)
    right = same_state(state, train_small(None, cuts=(0, STEPS)).state)
    assert right, "the inputs of a lost call must be as they were, so that it can be made again"


def _weighted_sums(states: Sequence[State], out: State) -> list[float]:
    """Return the sum of each row of Σ_k (k + 1) θ_k, which is built in another state."""
    for name, row in out.rows.items():
        row.zero_()
        for factor, state in enumerate(states, start=1):
            row.add_(state.rows[name], alpha=factor)
    return [row.double().sum().item() for row in out.rows.values()]


def _initial() -> State:
    return train_small(None, cuts=(0, 0)).state


def _raised(function: Callable[[], Any]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error
    return None
