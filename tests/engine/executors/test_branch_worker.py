"""What a worker does for a run: on its own device, with the problem of the phase."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_run
from forkmerge.engine.executors.branch_worker import BranchWorker, MakeBranchWorker, TrainingJob
from forkmerge.problem.batches import check_loaders
from forkmerge.problem.scoring import device_of
from problems import ADAM, Augmented, fit, noisy_net, seeded, shared_problem


def training_job(**options: Any) -> TrainingJob:
    return TrainingJob(shared_problem(), seeded(noisy_net), fm.Training(ADAM), 0, torch.get_num_threads(), **options)


def test_worker_i_trains_on_device_i_modulo_their_number() -> None:
    devices = (torch.device("cpu"), torch.device("meta"))
    for index, device in enumerate(devices * 2):
        worker = MakeBranchWorker(training_job(devices=devices))(index)
        assert device_of(worker.binding.model) == device


def test_a_worker_makes_its_problem_anew_where_it_can() -> None:
    problem = shared_problem()
    assert MakeBranchWorker(training_job(rebuild=lambda: problem))(0).job.problem is problem


def test_the_problem_of_a_phase_is_built_once() -> None:
    job = training_job()
    worker = BranchWorker(job, job.training.binding(job.model))
    assert worker.problem("search") is job.problem
    refit = worker.problem("refit")
    assert refit is worker.problem("refit")
    assert refit is not job.problem


class Closed(Augmented):
    """Holds what does not pickle, so its processes must be forked."""

    def __init__(self) -> None:
        super().__init__()
        self.double = lambda x: 2 * x

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, label = super().__getitem__(index)
        return self.double(inputs), label


def closed_problem() -> fm.Problem:
    return shared_problem(Closed())


def test_a_worker_reads_with_processes_of_its_own_which_need_not_pickle() -> None:
    here = fit(None, closed_problem(), steps=8)
    there = fit(None, closed_problem(), steps=8, workers=2, loader_workers=1, rebuild=closed_problem)
    assert_same_run(there, here)


def test_loaders_inside_workers_are_refused_where_they_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkmerge.problem.batches.sys.platform", "darwin")
    with pytest.raises(fm.ProblemError, match=r"do not go together on darwin.*leave loader_workers out.*workers=1"):
        fit(None, shared_problem(Augmented()), workers=2, loader_workers=1)
    check_loaders(shared_problem().stream_map.values())  # which are read in whole batches, without such processes
