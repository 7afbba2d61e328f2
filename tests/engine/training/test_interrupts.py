"""Ctrl-C and SIGTERM: a checkpoint after the step under way, then what would have happened without us."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from _asserts import assert_same_bits, facts
from forkmerge.algorithms.events import CheckpointWritten, PhaseStarted, StepProgress
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.engine.training.interrupts import held_back, is_stop_requested, stop_now
from problems import fit, problem_with, shared_losses

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    """Those of a terminal: jobs in the background of a script ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert [signal.getsignal(number) for number in BOTH] == [signal.default_int_handler, signal.SIG_DFL]
    assert not is_stop_requested()
    signal.signal(signal.SIGINT, before)


def stopping(at: int) -> Callable[..., Any]:
    """Losses in whose `at`-th call Ctrl-C is pressed."""
    calls = 0

    def losses(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGINT)
        return shared_losses(*arguments)

    return losses


ALGORITHMS = {
    "mixed": fm.ForkMerge("mixed", interval=4),
    "floor": fm.ForkMerge("per_auxiliary", interval=4, floor=True),
    "snapshots": fm.ForkMerge("mixed", interval=4, checkpoint="best_in_interval", validate_every=2, select="best"),
    "refit": fm.ForkMerge("mixed", interval=4, refit=True),
    "single": fm.SingleTask(),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_interrupted_after_any_step_nothing_but_time_is_lost(name: str, tmp_path: Path) -> None:
    algorithm = ALGORITHMS[name]
    whole = fit(algorithm, steps=8)
    calls = 0
    while calls < 200:
        calls += 3
        folder, losses = tmp_path / str(calls), stopping(calls)
        try:
            run = fit(algorithm, problem_with(losses), steps=8, folder=folder)
        except KeyboardInterrupt:
            if not folder.exists():
                continue  # before training, while the losses were checked
            run = fit(algorithm, problem_with(shared_losses), steps=8, folder=folder, resume=True)
            assert_same_bits(run.model, whole.model)
            assert facts(run) == facts(whole)
        else:
            break  # there are no so many calls
    assert calls < 200
    assert calls > 9


def test_the_checkpoint_has_all_steps_that_were_done(tmp_path: Path) -> None:
    done: list[int] = []

    def losses(model: Any, batch: Any, tasks: Any, context: fm.Context) -> Any:
        done.append(context.step)
        if context.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return shared_losses(model, batch, tasks, context)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(fm.SingleTask(), problem_with(losses), steps=8, folder=tmp_path / "run")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with RunFolder.open(tmp_path / "run", lock=False) as store:
        (branch,) = store.load()["branches"]
    assert branch["step"] == done[-1] + 1


def test_without_a_folder_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    done: list[int] = []

    def losses(model: Any, batch: Any, tasks: Any, context: fm.Context) -> Any:
        done.append(context.step)
        if context.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            done.append(-1)
        return shared_losses(model, batch, tasks, context)

    with pytest.raises(KeyboardInterrupt):
        fit(fm.SingleTask(), problem_with(losses), steps=8)
    assert done[-1] == 2


@pytest.mark.parametrize("kind", [PhaseStarted, StepProgress])
def test_in_worker_processes_too(kind: type, tmp_path: Path) -> None:
    """Steps in other processes end early, also in one that was still starting, and go on to the same bits."""
    algorithm, options = fm.ForkMerge("mixed", interval=300), {"steps": 600, "checkpoint_every": 50}
    timers, events = list[threading.Timer](), list[Any]()

    def observe(event: Any) -> None:
        events.append(event)
        if isinstance(event, kind) and not timers:
            timers.append(threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)))
            timers[0].start()

    with pytest.raises(KeyboardInterrupt):
        fit(algorithm, workers=2, folder=tmp_path / "run", on_event=observe, **options)
    assert isinstance(events[-1], CheckpointWritten)
    assert events[-1].step < (50 if kind is PhaseStarted else 200)
    resumed = fit(algorithm, folder=tmp_path / "run", resume=True, **options)
    whole = fit(algorithm, **options)
    assert_same_bits(resumed.model, whole.model)
    assert facts(resumed) == facts(whole)


def test_a_handler_of_the_users_own_stays() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with held_back(lambda: None):
            os.kill(os.getpid(), signal.SIGINT)
            assert calls == [signal.SIGINT]
            assert not is_stop_requested()
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_handler_that_ray_sets_waits_for_the_checkpoint() -> None:
    def end(number: int, frame: Any) -> None:
        raise SystemExit(number)

    end.__module__ = "ray._private.worker"  # as ray.init has it, called by the user before training
    signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit), held_back(lambda: None):  # noqa: PT012
            signal.raise_signal(signal.SIGTERM)
            assert is_stop_requested()
            stop_now()
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_workers_are_asked_once_and_a_second_interrupt_ends_at_once() -> None:
    asked: list[bool] = []
    with pytest.raises(KeyboardInterrupt), held_back(lambda: asked.append(True)):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        assert is_stop_requested()
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")
    assert asked == [True]


def test_nothing_is_held_back_in_another_thread() -> None:
    entered: list[Any] = []

    def enter() -> None:
        with held_back(lambda: None):
            entered.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [signal.default_int_handler]


def test_stopping_without_a_request_does_nothing() -> None:
    stop_now()
