"""Loaders whose passes are the same in every branch of a fork."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

import forkmerge as fm
from forked_training import BRANCHES, score, sgd, train
from problems import Augmented, plain_net, seeded

LOADERS: dict[str, Callable[[Augmented], DataLoader[Any]]] = {
    "shuffled": lambda data: DataLoader(data, batch_size=4, shuffle=True),
    "own generator": lambda data: DataLoader(
        data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "random sampler": lambda data: DataLoader(
        data, batch_size=4, sampler=RandomSampler(data, generator=torch.Generator())
    ),
    "weighted sampler": lambda data: DataLoader(
        data, batch_size=4, sampler=WeightedRandomSampler([1.0] * 16, 16, generator=torch.Generator())
    ),
    "workers": lambda data: DataLoader(data, batch_size=4, shuffle=True, num_workers=2),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_every_branch_gets_the_same_batches_and_the_same_randomness(kind: str) -> None:
    loader = LOADERS[kind](Augmented())
    forked = fm.fork(model := seeded(plain_net), sgd(model), BRANCHES, seed=4)
    rounds: list[list[Any]] = []
    for _ in range(2):
        seen = {}
        for branch in forked:
            passes = []
            for _ in range(2):
                drawn = []
                for inputs, labels in branch.paired(loader):
                    drawn.append((inputs.tolist(), labels.tolist(), torch.rand(1).item()))
                    torch.rand(len(branch.task_weights))  # a branch may use more randomness than another
                passes.append(drawn)
            seen[branch.name] = passes
        assert seen["alone"] == seen["joint"]
        assert len(seen["alone"][0]) == 4
        assert seen["alone"][0] != seen["alone"][1], "another pass is shuffled anew"
        rounds.append(seen["alone"])
        train(forked)
        forked.merge(score)
    assert rounds[0] != rounds[1], "another round is shuffled anew"


def test_workers_that_outlive_a_pass_are_refused() -> None:
    loader = DataLoader(Augmented(), batch_size=4, num_workers=1, persistent_workers=True)
    forked = fm.fork(model := plain_net(), sgd(model), BRANCHES)
    with pytest.raises(fm.ProblemError, match=r"persistent_workers=True keeps .*persistent_workers=False"):
        next(iter(forked["alone"].paired(loader)))


def test_the_callers_random_states_and_generators_come_back() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True, generator=generator)
    forked = fm.fork(model := plain_net(), sgd(model), BRANCHES)
    torch.manual_seed(1)
    before = torch.get_rng_state(), generator.get_state()
    for _ in forked["alone"].paired(loader):
        pass
    for index, _ in enumerate(forked["alone"].paired(loader)):
        if index == 1:
            break  # a pass may be left early
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(generator.get_state(), before[1])


def test_a_seed_of_its_own_is_another_order() -> None:
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True)
    model = plain_net()
    first = [
        next(iter(fm.fork(model, sgd(model), BRANCHES, seed=seed)["alone"].paired(loader)))[0].tolist()
        for seed in (0, 0, 1)
    ]
    assert first[0] == first[1]
    assert first[0] != first[2]


def test_any_iterable_can_be_paired() -> None:
    forked = fm.fork(model := plain_net(), sgd(model), BRANCHES)
    assert list(forked["alone"].paired([1, 2, 3])) == [1, 2, 3]
