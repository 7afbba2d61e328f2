"""A branch as the loop sees it, in either form of a fork."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import forkmerge as fm
from forked_training import BRANCHES, INPUTS, LABELS, sgd
from problems import plain_net, seeded


@pytest.mark.parametrize("in_place", [False, True])
def test_branches_say_what_they_are_and_read_the_same_batches(in_place: bool) -> None:
    model = seeded(plain_net)
    forked = fm.fork(model, sgd(model), BRANCHES, in_place=in_place)
    loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4, shuffle=True)
    orders = []
    for branch in forked:
        branch.task_weights["more"] = 1.0
        orders.append([labels.tolist() for _, labels in branch.paired(loader)])
        assert branch.scheduler is branch.scaler is None
        assert isinstance(branch.optimizer, torch.optim.SGD)
    assert orders[0] == orders[1]
    assert "more" not in BRANCHES["alone"]
    assert repr(forked["joint"]) == "ForkedBranch('joint', {'tgt': 1.0, 'odd': 0.5, 'more': 1.0}, lr_scale=1)"
    assert "Fork into 2 branches" in repr(forked)
