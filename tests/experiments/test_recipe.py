"""Recipes: what a TOML file or a command line may change, and what it leaves alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import forkmerge as fm
from forkmerge.experiments.recipe import data_key, load_recipe, recipe_from, source_for
from problems import evaluation, plain_net, shared_problem


def recipe() -> fm.Recipe:
    problem = shared_problem(test=evaluation())
    return fm.Recipe(problem, plain_net, fm.OptimizerOf("SGD", lr=0.1, momentum=0.9), 4)


def changed(**settings: object) -> fm.Recipe:
    return recipe_from({"settings": {"recipe": "tests.experiments.test_recipe:recipe", **settings}, "folders": []})


def longer_for_aux(target: str = "tgt") -> fm.Recipe:
    problem = replace(shared_problem(), validation={task: evaluation() for task in ("tgt", "aux")})
    return replace(recipe(), problem=problem, steps=8 if target == "aux" else 4)


def test_a_function_that_takes_the_target_gets_it() -> None:
    """Steps or data may depend on it, whoever chooses it: a file, the command line or a comparison."""
    settings = {"recipe": "tests.experiments.test_recipe:longer_for_aux", "arguments": {"target": "tgt"}}
    assert recipe_from({"settings": settings, "folders": []}).steps == 4
    aimed = recipe_from({"settings": {**settings, "target": "aux"}, "folders": []})
    assert (aimed.steps, aimed.problem.target) == (8, "aux")


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


RECIPE = """
import forkmerge as fm
from problems import SGD, plain_net, shared_problem

def recipe(size: int = 3) -> fm.Recipe:
    return fm.Recipe(shared_problem(), plain_net, SGD, steps=4)

def number() -> int:
    return 3
"""


class TestMistakes:
    @pytest.fixture
    def load(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], fm.Recipe]:
        (tmp_path / "a_recipe.py").write_text(RECIPE)
        monkeypatch.syspath_prepend(str(tmp_path))

        def write(text: str) -> fm.Recipe:
            path = tmp_path / "problem.toml"
            path.write_text(text)
            return fm.load_recipe(path)

        return write

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("stesp = 3", r"a recipe: unknown key 'stesp'\. Did you mean 'steps'\? Known: recipe"),
            ("[training]\nclip = 1.0", r"\[training\]: unknown key 'clip'\. Did you mean 'clip_norm'"),
            (
                "[algorithm]\nintervall = 3",
                r"\[algorithm\] ForkMerge: unknown key 'intervall'\. Did you mean 'inter",
            ),
            ("[algorithm]\nname = 'Forkmerge'", r"unknown algorithm 'Forkmerge'\. Did you mean 'ForkMerge'"),
            ("[algorithm]\npreset = 'papers'", r"unknown preset 'papers'\. Did you mean 'paper'"),
            ("target = 'tgd'", r"unknown task 'tgd'\. Did you mean 'tgt'"),
            ("[scheduler]\nT_max = 1", r"\[scheduler\] needs a name, e\.g\. name = 'CosineAnnealingLR'"),
            ("optimizer = 'Addam'", r"unknown optimizer 'Addam'\. Did you mean 'Adam'"),
            ("[arguments]\nsizes = 3", r"\[arguments\] do not fit .*'sizes'.*It takes: size"),
        ],
    )
    def test_an_unknown_key_offers_the_closest(self, load: Any, text: str, message: str) -> None:
        with pytest.raises(fm.ForkMergeError, match=message):
            load(f"recipe = 'a_recipe:recipe'\n{text}\n")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("steps = 3", "a recipe file needs recipe = 'module:function'"),
            ("steps = = 3", r"problem\.toml is not valid TOML"),
            ("recipe = 'a_recipe:recpe'", r"unknown function 'recpe'\. Did you mean 'recipe'"),
            ("recipe = 'a_recipe:number'", r"must return a forkmerge\.Recipe, got int"),
            ("recipe = 'no_such_module:recipe'", "no module named 'no_such_module'"),
            ("recipe = 'a_recipe.py:recipe'", "names a file: write a_recipe:recipe"),
            ("recipe = 'a_recipe'", "is neither a .toml file nor 'module:function'"),
        ],
    )
    def test_a_recipe_that_cannot_be_found(self, load: Any, text: str, message: str) -> None:
        with pytest.raises(fm.ConfigError, match=message):
            load(text)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ConfigError, match=r"cannot read .*gone\.toml: No such file"):
            fm.load_recipe(tmp_path / "gone.toml")


def test_development_puts_a_part_of_the_training_data_in_the_place_of_the_test_data() -> None:
    problem, plain = changed(development=True).problem, recipe().problem
    (test,) = problem.evaluations("test").values()
    (kept,), (all_examples,) = (made.stream_map.values() for made in (problem, plain))
    assert len(test.dataset) + len(kept.dataset) == len(all_examples.dataset)
    assert torch.equal(test.dataset[0][0], plain.for_development().evaluations("test")["tgt"].dataset[0][0])


def test_development_is_true_or_false() -> None:
    with pytest.raises(fm.ConfigError, match="development must be true or false, got 'maybe'"):
        fm.load_recipe("compare_problem:recipe", {"development": "maybe"})


def test_data_may_depend_on_a_target_that_the_recipe_takes():
    source = load_recipe("compare_problem:recipe").source
    keys = {data_key(source_for(source, seed, target)) for seed in (0, 1) for target in ("tgt", "aux")}
    assert len(keys) == 2, "the seeds'"
    aimed = load_recipe("compare_problem:aimed_recipe").source
    assert len({data_key(source_for(aimed, 0, target)) for target in ("tgt", "aux")}) == 2
    other = {"settings": {**source["settings"], "algorithm": {"interval": 2}}}
    assert data_key({**source, **other}) == data_key(source)
