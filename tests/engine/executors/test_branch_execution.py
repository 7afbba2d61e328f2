"""Branches on any executor: the bits of the serial run, whatever dies, results in the order of the branches."""

from __future__ import annotations

import gc
import os
import signal
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
from _asserts import assert_same_run, same_bits
from forkmerge.engine.executors import shared_rows
from forkmerge.engine.executors.branch_execution import BranchExecution, open_branches
from forkmerge.engine.executors.branch_worker import Segment, TrainingJob
from forkmerge.engine.executors.executor import Handle, WorkerLost
from forkmerge.engine.executors.process_executor import ProcessExecutor
from forkmerge.engine.executors.serial import SerialExecutor
from forkmerge.engine.merging.measure_candidate import MeasureRequest
from forkmerge.engine.training.state import State
from problems import (
    ADAM,
    TASKS,
    conv_net,
    domains_problem,
    evaluation,
    examples,
    fit,
    noisy_net,
    predict_target,
    seeded,
    shared_losses,
    shared_problem,
)


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
        assert_same_run(serial, other)


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
                shared_rows.WorkerRows.publish = _die  # type: ignore[method-assign]
            if self._once("raise"):
                raise ValueError("label out of range")
        return shared_losses(model, batch, tasks, context)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if self._once("while measuring"):
            os.kill(os.getpid(), signal.SIGKILL)
        return predict_target(model, batch)

    def _once(self, name: str) -> bool:
        try:
            (self.folder / name).unlink()  # two workers may try at once
        except FileNotFoundError:
            return False
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


def trained(execution: BranchExecution, rounds: int = 2) -> list[State]:
    """The three branches after some rounds of ten steps."""
    initial = execution.job.training.binding(seeded(noisy_net)).initial()
    states = [initial.clone() for _ in SEGMENTS]
    for _ in range(rounds):
        assert [result.state for result in execution.train(SEGMENTS, states)] == states
    return states


def plain(states: Sequence[State]) -> list[dict[str, Tensor]]:
    return [{**s.rows, **s.buffers, **s.optimizer_rows, "step": torch.tensor(s.step)} for s in states]


def agree(states: Sequence[State], others: Sequence[dict[str, Tensor]]) -> bool:
    return all(same_bits(one, other) for one, other in zip(plain(states), others, strict=True))


REQUESTS = [
    MeasureRequest((0.0, 1.0, 0.0)),
    MeasureRequest((0.5, 0.3, 0.2)),
    MeasureRequest((0.5, 0.3, 0.2), indices=(1, 4, 9)),
    MeasureRequest((0.0, 0.4, 0.6), batches=2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deadly")


@pytest.fixture(scope="module")
def serial(folder: Path) -> Iterator[BranchExecution]:
    with open_branches(deadly_job(folder), SerialExecutor()) as execution:
        yield execution


@pytest.fixture(scope="module")
def undisturbed(serial: BranchExecution) -> list[dict[str, Tensor]]:
    return plain(trained(serial))


@pytest.fixture(scope="class")
def processes() -> Iterator[ProcessExecutor]:
    with ProcessExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="class")
def execution(folder: Path, processes: ProcessExecutor) -> Iterator[BranchExecution]:
    with open_branches(deadly_job(folder), processes) as execution:
        yield execution


@pytest.mark.xdist_group("executor")
class TestDeaths:
    def test_rows_stay_in_shared_memory(
        self, execution: BranchExecution, processes: ProcessExecutor, undisturbed: Any
    ) -> None:
        states = trained(execution)
        assert agree(states, undisturbed)
        before = {row.data_ptr() for state in states for row in state.rows.values()}
        processes.put(states[0])
        assert {row.data_ptr() for state in states for row in state.rows.values()} == before

    def test_there_is_one_spare_branch_per_worker(self, execution: BranchExecution, processes: ProcessExecutor) -> None:
        gc.collect()
        states = trained(execution, rounds=1)
        execution.measure(states, REQUESTS)
        rows = sum(len(state.rows) + len(state.optimizer_rows) for state in states)
        assert len(processes.rows.alive) <= rows + 2 * rows / len(states)

    def test_memory_goes_with_the_states_that_had_it(
        self, execution: BranchExecution, processes: ProcessExecutor
    ) -> None:
        states = trained(execution)
        gc.collect()
        alive = len(processes.rows.alive)
        del states
        gc.collect()
        assert len(processes.rows.alive) <= alive - 9  # a row of parameters and two of the optimizer's, per branch

    @pytest.mark.parametrize("when", ["at a step", "at the end"])
    def test_a_segment_whose_worker_is_killed_is_done_again(
        self, when: str, execution: BranchExecution, folder: Path, undisturbed: Any
    ) -> None:
        (folder / when).touch()
        assert agree(trained(execution), undisturbed)
        assert not (folder / when).exists()

    def test_workers_measure_what_one_process_measures_even_if_one_is_killed(
        self, execution: BranchExecution, serial: BranchExecution, folder: Path
    ) -> None:
        here = serial.measure(trained(serial), REQUESTS)
        states = trained(execution)
        (folder / "while measuring").touch()
        for one, other in zip(here, execution.measure(states, REQUESTS), strict=True):
            assert one.metrics == other.metrics
            assert (one.costs is None) == (other.costs is None)
            assert one.costs is None or all(map(torch.equal, one.costs, other.costs))
        assert not (folder / "while measuring").exists()
        assert [measured.costs is None for measured in here] == [False, False, True, False]
        states[2].rows["float32"][0] = float("nan")
        assert [m.metrics is None for m in execution.measure(states, [*REQUESTS[:2], REQUESTS[3]])] == [
            False,
            True,
            True,
        ]

    def test_a_worker_killed_while_idle_is_replaced(
        self, execution: BranchExecution, processes: ProcessExecutor, undisturbed: Any
    ) -> None:
        for worker in processes.team.workers:
            assert worker.process.pid is not None
            os.kill(worker.process.pid, signal.SIGKILL)
        assert agree(trained(execution), undisturbed)

    def test_a_branch_that_ends_every_worker_is_named(
        self, execution: BranchExecution, folder: Path, undisturbed: Any
    ) -> None:
        (folder / "always").touch()
        with pytest.raises(fm.ProblemError, match=r"branch 'odd' at steps \d+ to \d+ ended 3 worker .*SIGKILL"):
            trained(execution)
        (folder / "always").unlink()
        assert agree(trained(execution), undisturbed)  # what was still in hand is forgotten


class Pieces(SerialExecutor):
    """Two workers, it says, so that segments are cut; each call is lost so many times before it is done."""

    workers = 2

    def __init__(self, losses: int = 0) -> None:
        self.losses = losses
        self.names: list[str] = []
        self.lost: list[str] = []

    def submit(self, payload: Any, handles: Sequence[Handle] = (), *, name: str = "call", note: Any = None) -> Handle:
        self.names.append(name)
        return super().submit(payload, handles, name=name, note=note)

    def result(self, handle: Handle) -> Any:
        if self.lost.count(handle.name) < self.losses:
            self.lost.append(handle.name)
            raise WorkerLost(handle, "a power cut")
        data = super().result(handle)
        return {**data, "seconds": float(handle.payload.steps)}  # type: ignore[attr-defined]  # all alike


LONG = [Segment("search", segment.mixture, 40) for segment in SEGMENTS]


def cut(executor: SerialExecutor, folder: Path) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
    """What three branches of forty steps come to."""
    with open_branches(deadly_job(folder), executor) as execution:
        initial = execution.binding.initial()
        results = list(execution.train(LONG, [initial.clone() for _ in LONG]))
    return plain([result.state for result in results]), [
        {"losses": r.losses, "sums": r.sums, "counts": r.counts, "reports": r.reports, "untouched": r.untouched}
        for r in results
    ]


class Names(SerialExecutor):
    """Keeps what calls are called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def submit(self, payload: Any, handles: Sequence[Handle] = (), *, name: str = "call", note: Any = None) -> Handle:
        self.names.append(name)
        return super().submit(payload, handles, name=name, note=note)


def test_a_dashboard_shows_round_branch_and_steps(folder: Path) -> None:
    executor = Names()
    with open_branches(deadly_job(folder), executor) as execution:
        state = execution.binding.initial()
        list(execution.train(LONG[:1], [state], "round 3"))
        execution.measure([state, state], [MeasureRequest((0.25, 0.75))])
    name = LONG[0].mixture.name
    assert executor.names == [
        f"round 3: branch {name!r} at steps 0 to 40",
        "round 3: measuring coefficients 0.25, 0.75 at step 40",
    ]


class TestParts:
    def test_a_segment_in_parts_is_the_segment(self, folder: Path) -> None:
        executor = Pieces()
        (states, results), (expected, others) = cut(executor, folder), cut(SerialExecutor(), folder)
        assert all(same_bits(one, other) for one, other in zip(states, expected, strict=True))
        assert [r["losses"] for r in results] == [r["losses"] for r in others]
        assert [r["counts"] for r in results] == [r["counts"] for r in others]
        assert len(executor.names) > 2 * len(LONG), "a first share each, then the rest, of which some are cut"
        assert executor.names[:3] == [f"branch {name!r} at steps 0 to 2" for name in ("alone", "aux", "odd")]

    def test_parts_that_are_lost_are_made_again_and_so_is_what_waits_for_them(self, folder: Path) -> None:
        executor = Pieces(losses=2)
        (states, _), (expected, _) = cut(executor, folder), cut(SerialExecutor(), folder)
        assert all(same_bits(one, other) for one, other in zip(states, expected, strict=True))
        assert set(executor.lost) == set(executor.names)
        assert max(map(executor.names.count, executor.names)) == 5, "a second part waited for a first one, lost twice"

    def test_a_part_that_is_lost_again_and_again_is_given_up_by_name(self, folder: Path) -> None:
        message = (
            "branch 'alone' at steps 0 to 2 ended 3 worker processes, the last with a power cut. "
            "What is in the run's folder is intact: resume it, with fewer workers."
        )
        with pytest.raises(fm.ProblemError) as error:
            cut(Pieces(losses=3), folder)
        assert str(error.value) == message


def test_one_branch_is_trained_at_a_time_and_only_when_it_is_asked_for(folder: Path) -> None:
    with open_branches(deadly_job(folder), SerialExecutor()) as execution:
        initial = execution.binding.initial()
        states = [initial.clone() for _ in SEGMENTS]
        results = execution.train(SEGMENTS, states)
        assert next(results).state is states[0]
        assert [state.step for state in states] == [10, 0, 0]
        assert next(results).state is states[1]
        assert [state.step for state in states] == [10, 10, 0]


def test_threads_are_those_of_the_job_while_it_is_open(folder: Path) -> None:
    before, job = torch.get_num_threads(), deadly_job(folder)
    job.threads = before + 1
    with open_branches(job, SerialExecutor()):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
