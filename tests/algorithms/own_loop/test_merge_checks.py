"""What a merge in one's own loop refuses, or warns of, before anybody believes it."""

from __future__ import annotations

import math
import warnings

import pytest

import forkmerge as fm
from _asserts import assert_same_bits
from forked_training import BRANCHES, score, sgd, step, train
from problems import plain_net, seeded


def forked() -> fm.Fork:
    return fm.fork(model := seeded(plain_net), sgd(model), BRANCHES)


def test_branches_of_unequal_numbers_of_steps_are_refused_unless_allowed() -> None:
    fork = forked()
    train(fork)
    fork["joint"].optimizer.step()
    message = r"different numbers of optimizer steps .*\(alone (\d+), joint \d+\).*allow_unequal_steps=True"
    with pytest.raises(fm.ProblemError, match=message):
        fork.merge(score)
    assert fork.merge(score, allow_unequal_steps=True).coefficients
    train(fork)
    assert fork.merge(score).coefficients, "steps are counted from the last merge on"


def test_an_untrained_branch_among_trained_ones_is_named() -> None:
    fork = forked()
    step(fork["joint"])
    with pytest.raises(fm.ProblemError, match="branch 'alone' has not changed since the last merge"):
        fork.merge(score)
    assert fork.merge(score, allow_unequal_steps=True).coefficients


def test_scores_that_are_all_nan_are_refused_and_the_branches_stay() -> None:
    fork = forked()
    train(fork)
    before = {branch.name: [p.detach().clone() for p in branch.model.parameters()] for branch in fork}
    with pytest.raises(fm.ProblemError, match="score of every branch is NaN"):
        fork.merge(lambda model: math.nan)
    for branch in fork:
        assert all((a == b).all() for a, b in zip(before[branch.name], branch.model.parameters(), strict=True))
    assert fork.merge(score).coefficients


def test_a_score_that_was_measured_already_is_refused() -> None:
    fork = forked()
    train(fork)
    with pytest.raises(fm.ProblemError, match=r"score must be a function of a model.*, got 0\.5"):
        fork.merge(0.5)  # type: ignore[arg-type]


def test_a_score_that_falls_as_a_loss_does_is_warned_of_once() -> None:
    fork = forked()
    for _ in range(2):
        train(fork)
        fork.merge(lambda model: -score(model))
    train(fork)
    with pytest.warns(UserWarning, match="return minus it: higher must be better"):
        fork.merge(lambda model: -score(model))


def test_a_score_that_rises_is_not_warned_of() -> None:
    fork = forked()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            train(fork)
            fork.merge(score)


def test_a_fork_that_goes_on_from_its_state_checks_what_it_would_have_checked() -> None:
    fork = forked()
    train(fork)
    fork["joint"].optimizer.step()
    stored = fork.state_dict()
    again = forked()
    again.load_state_dict(stored)
    with pytest.raises(fm.ProblemError, match="different numbers of optimizer steps"):
        again.merge(score)
    assert_same_bits(again["joint"].model, fork["joint"].model)
