"""Copies of all that a training loop holds: parameters, optimizer state, schedulers and scalers."""

from __future__ import annotations

import copy
import types

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_bits, same_bits
from forked_training import BRANCHES, CONTEXT, INPUTS, LABELS, score, sgd, step, train
from problems import TASKS, frozen_net, noisy_net, plain_net, seeded, shared_losses, tied_net


def test_frozen_parameters_are_shared_and_tied_ones_stay_tied() -> None:
    model = seeded(frozen_net)
    for branch in fm.fork(model, sgd(model), BRANCHES):
        assert branch.model.body[0].weight is model.body[0].weight
        assert branch.model.body[2].weight is not model.body[2].weight
    for branch in fm.fork(tied := seeded(tied_net), sgd(tied), BRANCHES):
        assert branch.model.body[1].first.weight is branch.model.body[1].second.weight


def test_a_branch_trains_exactly_as_the_original_would() -> None:
    model = seeded(noisy_net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    own = fm.fork(model, optimizer, {"all": dict.fromkeys(TASKS, 1.0)})["all"]
    own.model.train(), model.train()
    original = copy.copy(own)
    original.model, original.optimizer = model, optimizer
    for branch in (own, original):
        for index in range(4):
            torch.manual_seed(index)
            step(branch)
    assert_same_bits(own.model, model)


def test_an_optimizer_that_is_already_warm_is_forked_with_its_state() -> None:
    model = seeded(plain_net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    warm = fm.fork(model, optimizer, BRANCHES)["alone"]
    warm.model, warm.optimizer, warm.scheduler = model, optimizer, None
    for _ in range(3):
        step(warm)
    forked = fm.fork(model, optimizer, BRANCHES)
    branch = forked["alone"]
    assert branch.optimizer.state[branch.model.body[0].weight]["step"] == 3
    step(warm), step(branch)
    assert_same_bits(branch.model, model)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("started", [0, 2])
def test_copied_schedulers_do_not_warn_about_the_order_of_steps(started: int) -> None:
    model = seeded(plain_net)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(started):
        optimizer.step()
        scheduler.step()
    forked = fm.fork(model, optimizer, BRANCHES, scheduler=scheduler)
    for _ in range(2):
        train(forked, 2)
        forked.merge(score)
    for branch in forked:
        assert branch.scheduler.last_epoch == started + 4
        assert branch.scheduler.optimizer is branch.optimizer
        assert branch.optimizer.param_groups[0]["lr"] == branch.scheduler.get_last_lr()[0] < 0.3


def test_a_forgotten_optimizer_step_is_still_warned_about() -> None:
    model = plain_net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    branch = fm.fork(model, optimizer, BRANCHES, scheduler=scheduler)["alone"]
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        branch.scheduler.step()


def test_every_branch_has_its_own_scaler() -> None:
    model = seeded(plain_net)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    forked = fm.fork(model, sgd(model), BRANCHES, scaler=scaler)
    one, other = forked
    for branch in (one, other):
        loss = shared_losses(branch.model, (INPUTS, LABELS), ["tgt"], CONTEXT)["tgt"]
        branch.scaler.scale(loss).backward()
        if branch is other:
            branch.model.heads["tgt"].weight.grad[0, 0] = torch.inf
        branch.scaler.step(branch.optimizer)
        branch.scaler.update()
    assert (one.scaler.get_scale(), other.scaler.get_scale(), scaler.get_scale()) == (8.0, 4.0, 8.0)
    assert same_bits(other.model, model), "a step with an infinite gradient is skipped"
    forked.merge(score)
    assert (one.scaler.get_scale(), other.scaler.get_scale()) == (8.0, 4.0)


def test_a_forward_that_holds_the_model_itself_is_refused_for_its_copies_would_call_the_original() -> None:
    """As trl's SFTTrainer leaves it: branches would be trained, and the original scored in their place."""
    model = seeded(plain_net)
    plain = model.body.forward
    model.body.forward = types.MethodType(lambda self, inputs: plain(inputs), model.body)
    with pytest.raises(fm.ProblemError, match=r"body\.forward was replaced .*`del model\.body\.forward`"):
        fm.fork(model, sgd(model), BRANCHES)
    assert len(fm.fork(model, sgd(model), BRANCHES, in_place=True)) == len(BRANCHES)  # which copies nothing
    del model.body.forward
    assert len(fm.fork(model, sgd(model), BRANCHES)) == len(BRANCHES)


def test_a_forward_whose_copies_are_their_own_may_be_replaced() -> None:
    model = seeded(plain_net)
    model.body.forward = types.MethodType(lambda self, inputs: -type(self).forward(self, inputs), model.body)
    expected = model(INPUTS)
    for branch in fm.fork(model, sgd(model), BRANCHES):
        torch.nn.init.zeros_(branch.model.body[0].weight)
        assert not torch.equal(branch.model(INPUTS), expected)
