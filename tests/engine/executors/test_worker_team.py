"""A team of worker processes: what goes wrong in one of them, also while it starts, is told where it is awaited."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.engine.executors.executor import WorkerError
from forkmerge.engine.executors.worker_team import Team
from problems import SGD, TASKS, evaluation, examples, plain_net, shared_losses


class TwoArguments(Exception):
    """Cannot be rebuilt from its message, so it does not survive a pickle."""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)


def raising(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
    if context.step > 0:
        raise TwoArguments("label out of range", "stream t")
    return shared_losses(model, batch, tasks, context)


def test_an_exception_in_a_worker_arrives_with_its_traceback() -> None:
    stream = fm.Stream(TensorDataset(*examples(16, 1)), raising, TASKS, 8)
    problem = fm.Problem("tgt", stream, evaluation())
    with pytest.raises(WorkerError, match=r"(?s)Traceback.*TwoArguments: label out of range"):
        fm.ForkMerge().fit(problem, model=plain_net, optimizer=SGD, steps=4, workers=2, threads=1)


def end_at_once(index: int) -> Any:
    os._exit(3)


def test_a_second_start_has_what_the_first_left_of_the_time() -> None:
    team = Team(1)
    first = team.workers[0]
    try:
        team.start(end_at_once)
        with pytest.raises(fm.ProblemError, match="could not start: it ended with exit code 3"):
            team.events()
        assert team.workers[0] is not first
        assert team.workers[0].since == first.since
    finally:
        team.close()
        team.close()  # once more does no harm


def test_what_does_the_jobs_must_pickle() -> None:
    team = Team(0)
    with pytest.raises(fm.ProblemError, match=r"worker processes need .* that pickle.*workers=1"):
        team.start(lambda index: index)  # type: ignore[arg-type, return-value]
