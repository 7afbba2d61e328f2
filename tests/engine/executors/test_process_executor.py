"""Branches in worker processes: the bits of the serial run, whatever dies, and nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.engine.executors import shared_rows as shelf_module
from forkmerge.engine.executors import worker_team as workers_module
from forkmerge.engine.executors.process_executor import Enlist
from forkmerge.engine.executors.serial import Segment, SerialExecutor, TrainingJob, open_executor
from forkmerge.engine.executors.shared_rows import rest_to_wire
from forkmerge.engine.executors.worker_team import WorkerError
from forkmerge.engine.merging.measure_candidate import MeasureRequest
from forkmerge.engine.training.state import State
from forkmerge.problem.scoring import device_of
from paths import TESTS
from problems import (
    ADAM,
    TASKS,
    conv_net,
    domains_problem,
    evaluation,
    examples,
    facts,
    fit,
    noisy_net,
    predict_target,
    same_bits,
    seeded,
    shared_losses,
    shared_problem,
)

SHM = Path("/dev/shm")


class TestTheSameBits:
    """Segments long enough to be cut, so that branches change workers in the middle of a round."""

    @pytest.mark.parametrize(
        ("where", "algorithm", "problem", "net", "options"),
        [
            (
                {"workers": 3},
                fm.ForkMerge("per_auxiliary", interval=32, floor=True, optimizer_state="average"),
                domains_problem(validation=evaluation(metrics=fm.accuracy)),
                conv_net,
                {
                    "optimizer": fm.OptimizerOf("AdamW", lr=0.01, amsgrad=True),
                    "scheduler": fm.SchedulerOf("StepLR", step_size=7),
                    "channels_last": True,
                    "statistics": "target",
                },
            ),
            (
                {"devices": ["cpu", "cpu"]},
                fm.ForkMerge(
                    "per_auxiliary", interval=32, method="gradnorm", prune_to=2, bn="recompute", search_examples=16
                ),
                shared_problem(),
                noisy_net,
                {"optimizer": ADAM, "precision": "float16", "clip_norm": 1.0},
            ),
        ],
        ids=["AdamW, BatchNorm, channels_last, a race", "a method with state, float16, full passes"],
    )
    def test_worker_processes_give_the_bits_of_the_serial_run(
        self, where: Any, algorithm: Any, problem: Any, net: Any, options: Any
    ) -> None:
        serial = fit(algorithm, problem, net, steps=64, **options)
        other = fit(algorithm, problem, net, steps=64, **where, **options)
        assert not active_children()
        assert same_bits(serial, other)
        assert facts(serial) == facts(other)


@dataclass(frozen=True)
class Deadly:
    """Losses that end the process, or let it end later, while a file says so."""

    folder: Path

    def __call__(self, model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
        if "odd" in tasks and context.step % 10 == 5:
            if (self.folder / "always").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            if self._once("at a step"):
                model.body[0].weight.data.fill_(float("nan"))  # what it leaves behind must not matter
                os.kill(os.getpid(), signal.SIGKILL)
            if self._once("at the end"):
                shelf_module.WorkerRows.publish = _die  # type: ignore[method-assign]
            if self._once("raise"):
                raise ValueError("label out of range")
        return shared_losses(model, batch, tasks, context)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if self._once("while measuring"):
            os.kill(os.getpid(), signal.SIGKILL)
        return predict_target(model, batch)

    def _once(self, name: str) -> bool:
        file = self.folder / name
        if not file.exists():
            return False
        file.unlink()
        return True


def _die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def deadly_job(folder: Path) -> TrainingJob:
    deadly, data = Deadly(folder), TensorDataset(*examples(16, 1))
    validation = fm.Evaluation(data, {"accuracy": fm.accuracy, "nll": fm.nll}, deadly.predict, batch_size=5)
    problem = fm.Problem("tgt", fm.Stream(data, deadly, TASKS, 8), validation)
    return TrainingJob(problem, seeded(noisy_net), fm.Training(ADAM), 0, 1)


SEGMENTS = [
    Segment("search", fm.Mixture(name, weights), 10)
    for name, weights in {
        "alone": {"tgt": 1.0},
        "aux": {"tgt": 1.0, "aux": 1.0},
        "odd": {"tgt": 1.0, "odd": 1.0},
    }.items()
]


def trained(executor: SerialExecutor, rounds: int = 2) -> list[State]:
    """The three branches after some rounds of ten steps."""
    initial = executor.job.training.binding(seeded(noisy_net)).initial()
    states = [initial.clone() for _ in SEGMENTS]
    for _ in range(rounds):
        assert [result.state for result in executor.train(SEGMENTS, states)] == states
    return states


def plain(states: Sequence[State]) -> list[dict[str, Tensor]]:
    return [{**s.rows, **s.buffers, **s.optimizer_rows, "step": torch.tensor(s.step)} for s in states]


@pytest.fixture(scope="class")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deadly")


@pytest.fixture(scope="class")
def executor(folder: Path) -> Iterator[Any]:
    with open_executor(deadly_job(folder), 2) as executor:
        yield executor


QUESTIONS = [
    MeasureRequest((0.0, 1.0, 0.0)),
    MeasureRequest((0.5, 0.3, 0.2)),
    MeasureRequest((0.5, 0.3, 0.2), indices=(1, 4, 9)),
    MeasureRequest((0.0, 0.4, 0.6), batches=2),
]


@pytest.fixture(scope="class")
def serial(folder: Path) -> Iterator[SerialExecutor]:
    with open_executor(deadly_job(folder), 1) as executor:
        yield executor


@pytest.fixture(scope="class")
def undisturbed(serial: SerialExecutor) -> list[dict[str, Tensor]]:
    return plain(trained(serial))


def agree(states: Sequence[State], others: Sequence[dict[str, Tensor]]) -> bool:
    return all(same_bits(one, other) for one, other in zip(plain(states), others, strict=True))


@pytest.mark.xdist_group("executor")
class TestDeaths:
    def test_rows_stay_in_shared_memory_and_do_not_travel(self, executor: Any, undisturbed: Any) -> None:
        states = trained(executor)
        assert agree(states, undisturbed)
        before = [row.data_ptr() for row in states[0].rows.values()]
        executor.shelf.place(states[0])
        assert [row.data_ptr() for row in states[0].rows.values()] == before
        wide = State(0, {"float32": torch.zeros(10**6)}, optimizer_rows={"exp_avg/float32": torch.zeros(10**6)})
        assert len(pickle.dumps(rest_to_wire(wide))) < 2000

    def test_memory_goes_with_the_states_that_had_it(self, executor: Any) -> None:
        states = trained(executor)
        gc.collect()
        held = len(executor.shelf.alive)
        del states
        gc.collect()
        assert len(executor.shelf.alive) <= held - 3  # a row of parameters per branch, at least

    @pytest.mark.parametrize("when", ["at a step", "at the end"])
    def test_a_segment_whose_worker_is_killed_is_done_again(
        self, when: str, executor: Any, folder: Path, undisturbed: Any
    ) -> None:
        (folder / when).touch()
        assert agree(trained(executor), undisturbed)
        assert not (folder / when).exists()

    def test_workers_measure_what_one_process_measures_even_if_one_is_killed(
        self, executor: Any, serial: SerialExecutor, folder: Path
    ) -> None:
        here = serial.measure(trained(serial), QUESTIONS)
        states = trained(executor)
        (folder / "while measuring").touch()
        for one, other in zip(here, executor.measure(states, QUESTIONS), strict=True):
            assert one.metrics == other.metrics
            assert (one.costs is None) == (other.costs is None)
            assert one.costs is None or all(map(torch.equal, one.costs, other.costs))
        assert not (folder / "while measuring").exists()
        assert [measured.costs is None for measured in here] == [False, False, True, False]
        states[2].rows["float32"][0] = float("nan")
        assert [m.metrics is None for m in executor.measure(states, [*QUESTIONS[:2], QUESTIONS[3]])] == [
            False,
            True,
            True,
        ]

    def test_a_worker_killed_while_idle_is_replaced(self, executor: Any, undisturbed: Any) -> None:
        for worker in executor.team.workers:
            os.kill(worker.process.pid, signal.SIGKILL)
        assert agree(trained(executor), undisturbed)

    def test_a_branch_that_ends_every_worker_is_named(self, executor: Any, folder: Path, undisturbed: Any) -> None:
        (folder / "always").touch()
        with pytest.raises(fm.ProblemError, match=r"branch 'odd' at steps \d+ to \d+ ended 3 worker .*SIGKILL"):
            trained(executor)
        (folder / "always").unlink()
        assert agree(trained(executor), undisturbed)  # what was still in hand is forgotten


class TestDevices:
    def test_worker_i_trains_on_device_i_modulo_their_number(self) -> None:
        devices = (torch.device("cpu"), torch.device("meta"))
        for index, device in enumerate(devices * 2):
            job = TrainingJob(shared_problem(), seeded(noisy_net), fm.Training(ADAM), 0, 1, devices=devices)
            hand = Enlist(job)(index)
            assert device_of(hand.executor.binding.model) == device

    @pytest.mark.parametrize(
        ("devices", "message"),
        [
            ("cuda", r"devices must be a list such as \['cuda:0', 'cuda:1'\], got 'cuda'"),
            ([], "devices must be a list"),
            (["cpu", "gpu:1"], "device 'gpu:1' cannot be used"),
            (["cpu", 1.5], "device '1.5' cannot be used"),
            (["meta"], "device 'meta' cannot be used: it holds no numbers"),
        ],
    )
    def test_bad_names_are_refused_before_training(self, devices: Any, message: str) -> None:
        with pytest.raises(fm.ProblemError, match=message):
            fit(devices=devices, observe=lambda event: pytest.fail("it has begun"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_devices_that_the_machine_lacks_are_refused_before_training(self) -> None:
        with pytest.raises(fm.ProblemError, match="device 'cuda:0' cannot be used"):
            fit(devices=["cuda:0"], observe=lambda event: pytest.fail("it has begun"))

    def test_devices_of_several_kinds_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forkmerge.engine.executors.devices._device", torch.device)
        with pytest.raises(fm.ProblemError, match=r"of one kind.*got cpu and cuda"):
            fit(devices=["cpu", "cuda:0"])

    def test_one_device_needs_no_process(self) -> None:
        assert same_bits(fit(devices=["cpu"], workers=1), fit())


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
        begin = workers_module.Worker.__init__
        monkeypatch.setattr(workers_module.Worker, "__init__", lambda w, index: (begin(w, index), started.append(w))[0])
        with pytest.raises(fm.ProblemError, match="one number"):
            fit(None, shared_problem(metrics=_no_number), workers=2)
        assert len(started) == 2
        fit(None, shared_problem(), steps=4, workers=2)
        assert len(started) == 4, "the processes that were started early are those that work"
        assert not any(worker.process.is_alive() for worker in started)

    def test_a_second_start_has_what_the_first_left_of_the_time(self) -> None:
        team = workers_module.Team(end_at_once, 1)
        first = team.workers[0]
        try:
            with pytest.raises(fm.ProblemError, match="could not start: it ended with exit code 3"):
                team.events()
            assert team.workers[0] is not first
            assert team.workers[0].since == first.since
        finally:
            team.close()

    def test_a_worker_that_says_nothing_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers_module, "_START_LIMIT", 0.0)
        with pytest.raises(fm.ProblemError, match="could not start: nothing was heard of it for 0 seconds"):
            fit(workers=2)


def end_at_once(index: int) -> Any:
    os._exit(3)


SCRIPT = """
import time
from multiprocessing import active_children
from problems import fit

def observe(event):
    if event["event"] == "segment":
        print(*(child.pid for child in active_children()), flush=True)
        time.sleep(60)

if __name__ == "__main__":
    fit(workers=2, observe=observe)
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
