"""The state of a fork by parameter: all of it comes back, also in a fork that was never trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forkmerge as fm
from _asserts import assert_same_state
from forked_training import BRANCHES, score, sgd, train
from forkmerge.algorithms.own_loop.parameter_state import packed, unpacked
from problems import frozen_net, noisy_net, plain_net, seeded, tied_net


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


OPTIMIZERS = {
    "momentum": sgd,
    "plain": lambda m: sgd(m, momentum=0.0),
    "adam": lambda m: torch.optim.Adam(trained(m), lr=0.01, amsgrad=True),
    "adafactor": lambda m: torch.optim.Adafactor(trained(m), lr=0.05),
    "learning rate in a tensor": lambda m: torch.optim.Adam(trained(m), lr=torch.tensor(0.01)),
}


def forked(make: Any, net: Any = plain_net, **options: Any) -> fm.Fork:
    model = seeded(net)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return fm.fork(model, optimizer, BRANCHES, scheduler=scheduler, **options)


def read(value: dict[str, Any], room: dict[str, Any]) -> dict[str, Any]:
    """What torch's distributed checkpoint does: tensors are read into those that are there, and no others."""
    result: dict[str, Any] = {}
    for key, place in room.items():
        if isinstance(place, dict):
            result[key] = read(value[key], place)
        elif isinstance(place, torch.Tensor):
            result[key] = place.copy_(value[key])
        else:
            result[key] = value[key]
    return result


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("net", [plain_net, noisy_net, tied_net, frozen_net])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_state_comes_back_in_a_fork_that_was_never_trained(name: str, net: Any, in_place: bool) -> None:
    make = OPTIMIZERS[name]
    one = forked(make, net, in_place=in_place)
    train(one)
    one.merge(score)
    train(one, steps=1)
    other = forked(make, net, in_place=in_place)
    other.load_state_dict(read(one.state_dict(by_parameter=True), other.state_dict(by_parameter=True)))
    for branch in one._branches:
        left, right = one[branch]._state, other[branch]._state
        one._models.gather()
        right.buffers = {key: buffer for key, buffer in right.buffers.items() if key in left.buffers}
        assert_same_state(left, right)
    for each in (one, other):
        train(each, steps=1, dropout=True)
    assert one.merge(score).candidates == other.merge(score).candidates


def test_an_optimizer_that_cannot_be_tried_is_saved_as_it_is() -> None:
    one = forked(lambda m: torch.optim.LBFGS(m.parameters()))
    value = one.state_dict(by_parameter=True)
    assert not any(value["branches"]["alone"]["optimizer"].values())
    one.load_state_dict(value)


def test_what_is_wrong_with_a_state_is_said_by_name() -> None:
    one = forked(sgd)
    train(one)
    value = one.state_dict(by_parameter=True)
    smaller = fm.fork(made := nn.Linear(2, 1), torch.optim.SGD(made.parameters(), lr=0.1), BRANCHES)
    with pytest.raises(fm.ProblemError, match=r"state is that of another model: parameter 'body\.0\.weight'"):
        smaller.load_state_dict(value)
    del value["branches"]["joint"]["weights"]["body.0.weight"]
    with pytest.raises(fm.ProblemError, match=r"'body\.0\.weight' is missing in it"):
        forked(sgd).load_state_dict(value)
    value = one.state_dict(by_parameter=True)
    del value["branches"]["joint"]["optimizer"]["body.0.weight"]["momentum_buffer"]
    with pytest.raises(fm.ProblemError, match=r"'momentum_buffer' of an optimizer for parameter 'body\.0\.weight'"):
        forked(sgd).load_state_dict(value)


def test_plain_data_comes_back_from_its_text() -> None:
    value = {
        "lr": torch.tensor(0.1, dtype=torch.float64),
        "betas": (0.9, 0.99),
        "counts": {0: 3},
        "last": float("-inf"),
    }
    back = unpacked(packed(value))
    assert torch.equal(back.pop("lr"), value.pop("lr"))  # type: ignore[arg-type]
    assert back == value
