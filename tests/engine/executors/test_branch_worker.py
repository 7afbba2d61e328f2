"""What a worker does for a run: on its own device, with the problem of the phase."""

from __future__ import annotations

from typing import Any

import torch

import forkmerge as fm
from forkmerge.engine.executors.branch_worker import BranchWorker, MakeBranchWorker, TrainingJob
from forkmerge.problem.scoring import device_of
from problems import ADAM, noisy_net, seeded, shared_problem


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
