"""Recipes: what a TOML file or a command line may change, and what it leaves alone."""

import torch

import forkmerge as fm
from forkmerge.experiments.recipe import recipe_from
from problems import plain_net, shared_problem


def recipe() -> fm.Recipe:
    return fm.Recipe(shared_problem(), plain_net, fm.OptimizerOf("SGD", lr=0.1, momentum=0.9), 4)


def changed(**settings: object) -> fm.Recipe:
    return recipe_from({"settings": {"recipe": "tests.experiments.test_recipe:recipe", **settings}, "folders": []})


def test_an_option_alone_changes_the_recipes_own_optimizer() -> None:
    made = changed(optimizer={"lr": 0.5}).optimizer(plain_net())
    assert isinstance(made, torch.optim.SGD)
    assert made.defaults["lr"] == 0.5
    assert made.defaults["momentum"] == 0.9


def test_a_named_optimizer_starts_from_its_own_defaults() -> None:
    made = changed(optimizer={"name": "Adam", "lr": 0.5}).optimizer(plain_net())
    assert isinstance(made, torch.optim.Adam)
    assert made.defaults["betas"] == (0.9, 0.999)


def test_options_alone_change_the_recipes_own_algorithm() -> None:
    algorithm = changed(algorithm={"interval": 2}).algorithm
    assert algorithm == fm.ForkMerge(interval=2)
