"""A few steps of a recipe, trained as `fit` would train them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_bits, bits
from forkmerge.engine.training.branch import train_branch
from forkmerge.engine.training.options import Mixture
from forkmerge.experiments.short_training import short_training
from problems import SGD, plain_net, seeded, shared_problem

RECIPE = fm.Recipe(shared_problem(), plain_net, SGD, steps=4, algorithm=fm.SingleTask(), options={"threads": 1})


def test_its_steps_are_those_of_a_run() -> None:
    run = replace(RECIPE, model=seeded(plain_net)).fit()
    model, problem = seeded(plain_net), RECIPE.problem
    with short_training(RECIPE, RECIPE.algorithm.settings(problem), model, 0) as training:
        binding = training.binding(model)
        state = binding.initial()
        train_branch(binding, problem, Mixture("alone", {"tgt": 1.0}), state, training=training, seed=0, steps=4)
        binding.attach_weights(state)
    trained = dict(model.state_dict())
    assert_same_bits(bits(run), {name: trained[name] for name in bits(run)})


def test_options_of_the_recipe_and_the_method_reach_it_but_no_compiler() -> None:
    recipe = replace(RECIPE, options={"clip_norm": 0.5, "compile": True, "checkpoint_every": 3, "seed": 7})
    settings = fm.Joint(method="pcgrad").settings(recipe.problem)
    with short_training(recipe, settings, plain_net(), 7) as training:
        assert (training.clip_norm, training.compile) == (0.5, False)
        assert training.method == fm.methods.PCGrad()


def test_what_fit_refuses_is_refused_and_the_model_left_as_it_was() -> None:
    model = seeded(plain_net)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = fm.ForkMerge({"bad": {"tgt": -1.0}}).settings(RECIPE.problem)
    with (
        pytest.raises(fm.ProblemError, match="must be a finite number ≥ 0"),
        short_training(RECIPE, settings, model, 0),
    ):
        pass
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_rule_is_checked_with_the_metric_that_the_search_goes_by() -> None:
    def flat(predictions: torch.Tensor, targets: torch.Tensor) -> float:
        return 0.5

    recipe = replace(RECIPE, problem=shared_problem(metrics={"flat": flat}))
    rule = fm.ForkMerge("mixed", rule="one_standard_error")
    with short_training(recipe, replace(rule, search_by="nll").settings(recipe.problem), plain_net(), 0):
        pass
    with (
        pytest.raises(fm.ProblemError, match="needs metrics that add up over examples"),
        short_training(recipe, rule.settings(recipe.problem), plain_net(), 0),
    ):
        pass
