"""A team of worker processes: what goes wrong in one of them is told where it is awaited."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.engine.executors.worker_team import WorkerError
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
