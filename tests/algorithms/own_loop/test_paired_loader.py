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


def test_passes_are_counted_per_loader_so_that_branches_may_use_different_ones() -> None:
    target = DataLoader(Augmented(), batch_size=4, shuffle=True)
    auxiliary = DataLoader(Augmented(40), batch_size=4, shuffle=True)
    forked = fm.fork(model := plain_net(), sgd(model), BRANCHES, seed=4)
    batches: dict[str, list[Any]] = {branch.name: [] for branch in forked}
    for _ in range(3):
        batches["alone"] += [inputs.tolist() for inputs, _ in forked["alone"].paired(target)]
    for _ in range(3):  # the other way round, too: the auxiliary's pass begins first
        pairs = zip(forked["joint"].paired(auxiliary), forked["joint"].paired(target), strict=False)
        batches["joint"] += [inputs.tolist() for _, (inputs, _) in pairs]
    assert batches["alone"] == batches["joint"]
    assert batches["alone"][:4] != batches["alone"][4:8]


def test_loaders_made_anew_in_every_branch_are_paired_by_type_and_length() -> None:
    forked = fm.fork(model := plain_net(), sgd(model), BRANCHES, seed=4)
    batches = {}
    for branch in forked:
        passes = [branch.paired(DataLoader(Augmented(), batch_size=4, shuffle=True)) for _ in range(2)]
        batches[branch.name] = [[inputs.tolist() for inputs, _ in each] for each in passes]
    assert batches["alone"] == batches["joint"]
    assert batches["alone"][0] != batches["alone"][1]


def test_zipped_passes_of_unequal_length_give_the_caller_its_random_state_back() -> None:
    short, long = DataLoader(Augmented(8), batch_size=4), DataLoader(Augmented(), batch_size=4, shuffle=True)
    forked = fm.fork(model := plain_net(), sgd(model), BRANCHES)
    for pair in ((short, long), (long, short)):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        for _ in zip(*(forked["alone"].paired(loader) for loader in pair), strict=False):
            torch.rand(3)
        assert torch.equal(torch.get_rng_state(), before)


def drawn(branch: Any, loader: DataLoader[Any]) -> list[Any]:
    return [inputs.tolist() for inputs, _ in branch.paired(loader)]


def test_loaders_of_one_type_and_length_are_told_apart_whatever_their_order() -> None:
    target, other, third = (DataLoader(Augmented(), batch_size=4, shuffle=True) for _ in range(3))
    forked = fm.fork(model := plain_net(), sgd(model), BRANCHES, seed=4)
    alone = [drawn(forked["alone"], target), drawn(forked["alone"], third)]
    joint = [drawn(forked["joint"], loader) for loader in (other, third, target)]
    assert alone == [joint[2], joint[1]]
    assert joint[0] not in alone


def test_a_loader_made_anew_in_every_branch_is_the_same_in_later_passes_too() -> None:
    forked = fm.fork(model := plain_net(), sgd(model), BRANCHES, seed=4)
    batches = {}
    for branch in forked:
        loader = DataLoader(Augmented(), batch_size=4, shuffle=True)
        batches[branch.name] = [drawn(branch, loader) for _ in range(3)]
    assert batches["alone"] == batches["joint"]
    assert batches["alone"][0] != batches["alone"][1]


def test_an_iterator_made_anew_in_every_branch_is_paired() -> None:
    forked = fm.fork(model := plain_net(), sgd(model), BRANCHES, seed=4)
    noise = [[torch.rand(1).item() for _ in branch.paired(enumerate([1, 2]))] for branch in forked]
    assert noise[0] == noise[1]
