"""One branch: the same training however it is cut, and done again step by step where something is not finite."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import forkmerge as fm
from _asserts import assert_same_state
from forkmerge.engine.training.branch import BranchResult, train_branch
from forkmerge.methods import EW, METHODS, LossMethod
from forkmerge.problem.randomness import random_state_kept
from forkmerge.testing import TASKS, SmallLosses, SmallNet, small_problem
from problems import ADAM, Augmented, noisy_net, seeded, shared_problem


def train_once(method: LossMethod, problem: fm.Problem, *, suspected: bool, steps: int = 5) -> BranchResult:
    """Train a branch that is looked at step by step from the start, or not."""
    training = fm.Training(optimizer=fm.OptimizerOf("Adam", lr=0.01), method=method)
    with random_state_kept():
        torch.manual_seed(1)
        binding = training.binding(SmallNet())
    binding.suspects.update({"b"} if suspected else ())
    mixture = fm.Mixture("b", dict.fromkeys(TASKS, 1.0))
    return train_branch(binding, problem, mixture, binding.initial(), steps=steps, training=training, seed=3)


class TestLookingBack:
    """Loss methods look for what is not finite after a segment, and do it again step by step if they find some."""

    @pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if issubclass(kind, LossMethod)])
    @pytest.mark.parametrize("oddity", [{}, {"odd": "noise", "how": "poison", "since": 3}], ids=["sound", "poisoned"])
    def test_the_bits_are_those_of_looking_at_every_step(self, name: str, oddity: dict[str, Any]) -> None:
        results = [train_once(METHODS[name](), small_problem(**oddity), suspected=is_one) for is_one in (False, True)]
        assert_same_state(results[0].state, results[1].state)
        assert results[0].reports == results[1].reports == ({"not finite": {"noise": 2}} if oddity else {})

    def test_an_error_that_a_spoilt_model_causes_is_not_the_users(self) -> None:
        def refuse(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> Any:
            if not all(bool(p.isfinite().all()) for p in model.parameters()):
                raise ValueError("the weights are not finite")
            return SmallLosses(odd="noise", how="poison", since=2)(model, batch, tasks, context)

        problem = small_problem()
        streams = [replace(stream, losses=refuse) for stream in problem.stream_map.values()]
        changed = fm.Problem("target", streams, problem.target_validation)
        result = train_once(EW(), changed, suspected=False)
        assert result.state.is_finite()
        assert result.reports == {"not finite": {"noise": 3}}

    def test_an_error_of_the_users_own_is_raised_at_once(self) -> None:
        calls = []

        def fail(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> Any:
            calls.append(context.step)
            if context.step == 2:
                raise ValueError("mine")
            return SmallLosses()(model, batch, tasks, context)

        problem = small_problem()
        streams = [replace(stream, losses=fail) for stream in problem.stream_map.values()]
        with pytest.raises(ValueError, match="mine"):
            train_once(EW(), fm.Problem("target", streams, problem.target_validation), suspected=False)
        assert calls == [0, 1, 2]


def test_training_in_segments_of_any_length_is_training_at_once() -> None:
    training, problem = fm.Training(ADAM, fm.SchedulerOf("StepLR", step_size=3)), shared_problem(Augmented())
    mixture = fm.Mixture("branch", {"tgt": 1.0, "odd": 0.5})
    go = partial(train_branch, problem=problem, mixture=mixture, training=training, seed=3)
    binding = training.binding(seeded(noisy_net))
    first = binding.initial()
    whole = go(binding, state=first.clone(), steps=9).state
    parts = first.clone()
    for start, end in pairwise((0, 1, 4, 5, 9)):
        other = go(binding, state=first.clone(), steps=2).state  # another branch at work on the same binding
        parts = go(binding, state=parts, steps=end - start).state
    assert other.step == 2
    assert_same_state(whole, parts)
