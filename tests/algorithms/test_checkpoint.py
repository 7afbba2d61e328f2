"""What a run remembers between two moments: sums that do not depend on pauses, and states that come back."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from problems import TASKS, evaluation, examples, fit, shared_losses


def test_recorded_losses_do_not_depend_on_where_training_pauses() -> None:
    def sparse(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
        found = shared_losses(model, batch, tasks, context)
        return {task: loss for task, loss in found.items() if task == "tgt" or context.step % 3 == 0}

    stream = fm.Stream(TensorDataset(*examples(16, 1)), sparse, TASKS, 8)
    problem = fm.Problem("tgt", stream, evaluation())
    whole, pieces = (fit(fm.Joint(), problem, steps=10, checkpoint_every=every) for every in (None, 2))
    for one, other in zip(whole.rounds, pieces.rounds, strict=True):
        assert one.branches["joint"].losses == pytest.approx(other.branches["joint"].losses, rel=1e-5)
