"""Worker processes: they start early, die loudly, and leave nothing behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import forkmerge as fm
from forkmerge.engine.executors import worker_team
from forkmerge.engine.executors.executor import Answer, Inputs, Tell, WorkerError
from forkmerge.engine.executors.process_executor import ProcessExecutor
from forkmerge.engine.executors.serial import SerialExecutor, local_executor
from forkmerge.engine.training.state import State
from paths import TESTS
from problems import fit, shared_problem

SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Rebuild:
    """A problem that cannot be made in a worker."""

    how: str

    def __call__(self) -> fm.Problem:
        if self.how == "raise":
            raise OSError("the data set is not on this machine")
        os._exit(3)


def _no_number(predictions: Tensor, targets: Tensor) -> Tensor:
    return predictions


class TestStarting:
    @pytest.mark.parametrize(
        ("how", "error", "message"),
        [
            ("raise", WorkerError, r"(?s)Traceback.*OSError: the data set is not on this machine"),
            ("exit", fm.ProblemError, r"could not start: it ended with exit code 3.*__main__.*workers=1"),
        ],
    )
    def test_a_worker_that_cannot_start_is_an_error(self, how: str, error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            fit(workers=2, rebuild=Rebuild(how))
        assert not active_children()

    def test_workers_of_a_run_that_is_refused_end_with_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[Any] = []
        begin = worker_team.Worker.__init__
        monkeypatch.setattr(worker_team.Worker, "__init__", lambda w, index: (begin(w, index), started.append(w))[0])
        with pytest.raises(fm.ProblemError, match="one number"):
            fit(None, shared_problem(metrics=_no_number), workers=2)
        assert len(started) == 2
        fit(None, shared_problem(), steps=4, workers=2)
        assert len(started) == 4, "the processes that were started early are those that work"
        assert not any(worker.process.is_alive() for worker in started)

    def test_a_worker_that_says_nothing_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_team, "_START_LIMIT", 0.0)
        with pytest.raises(fm.ProblemError, match="could not start: nothing was heard of it for 0 seconds"):
            fit(workers=2)


def double(payload: Any, inputs: Inputs, tell: Tell) -> Answer:
    """Double the rows of the first state, which gets one more of the optimizer's."""
    state = inputs.take()
    for row in state.rows.values():
        row.mul_(2)
    state.optimizer_rows["momentum/float32"] = state.rows["float32"].clone()
    state.step += 1
    return Answer(os.getpid(), state)


def make_double(index: int) -> Any:
    return double


class TestSharedMemory:
    def test_a_state_travels_as_counters_and_keeps_to_two_memories(self) -> None:
        state = State(0, {"float32": torch.ones(10_000)}, {"mean": torch.zeros(2)})
        with ProcessExecutor(2) as executor:
            executor.start(make_double)
            handle = executor.put(state)
            assert len(pickle.dumps(handle.rest)) < 2000  # type: ignore[attr-defined]
            starts = {state.rows["float32"].data_ptr()}
            for doublings in range(1, 7):
                handle = executor.submit("double", [executor.put(state)], name="double")
                assert executor.result(handle) != os.getpid()
                assert state.rows == {}, "what others may write to by now is not shown"
                executor.fetch(handle, state)
                starts.add(state.rows["float32"].data_ptr())
                assert state.step == doublings
                assert bool((state.rows["float32"] == 2.0**doublings).all())
                assert torch.equal(state.optimizer_rows["momentum/float32"], state.rows["float32"])
            assert len(starts) <= 4  # those of the state and of spare rows, parameters' and the optimizer's
            assert len(executor.rows.alive) <= 4
        assert not active_children()

    def test_a_call_that_nobody_waits_for_never_begins(self) -> None:
        begun: list[Any] = []
        with ProcessExecutor(1) as executor:
            executor.start(make_double)
            state, other = (State(0, {"float32": torch.ones(4)}) for _ in range(2))
            executor.submit("dropped", [executor.put(state)], note=begun.append)
            executor.result(executor.submit("kept", [executor.put(other)]))
        assert not begun
        assert state.step == 0


def test_one_worker_needs_no_process() -> None:
    for workers in (0, 1):
        assert isinstance(local_executor(workers), SerialExecutor)
    assert not active_children()


SCRIPT = """
import time
from multiprocessing import active_children
from forkmerge.algorithms.events import StepProgress
from problems import fit

def observe(event):
    if isinstance(event, StepProgress):
        print(*(child.pid for child in active_children()), flush=True)
        time.sleep(60)

if __name__ == "__main__":
    fit(workers=2, on_event=observe)
"""


def test_a_killed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    before = set(os.listdir(SHM)) if SHM.is_dir() else set()
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its run"
        time.sleep(0.1)
    left = set(os.listdir(SHM)) - before if SHM.is_dir() else set()
    assert not {name for name in left if name.startswith(("fm-", "torch_", "psm_"))}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
