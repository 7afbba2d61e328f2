"""Pre-training as a step of a recipe: done once, found again by its content, loaded strictly into a part of a model."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import compare_problem
import forkmerge as fm
from forkmerge.algorithms.events import Notice, PretrainingProgress
from forkmerge.algorithms.fit import build_model
from forkmerge.engine.storage.user_folders import cache_folder
from forkmerge.experiments import pretraining
from forkmerge.experiments.comparison import plan_comparison, run_comparison
from forkmerge.experiments.cost_of_run import estimate_run
from forkmerge.experiments.events import JobsPlanned, JobStarted
from forkmerge.experiments.pretraining import Pretrained, content_key, find_weights, first_model, load_part, pretrained
from forkmerge.experiments.run_results import read_plan, read_run_results
from problems import Stopped, plain_net

TABLE = """
recipe = "compare_problem:recipe"
steps = 4
{extra}
[pretrain]
recipe = "compare_problem:recipe"
target = "aux"
steps = 6
seed = 7
part = "body"

[pretrain.optimizer]
name = "Adam"
lr = 0.05
"""

PROBLEM = "compare_problem:recipe"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "small.toml"
    path.write_text(TABLE.format(extra=""))
    return path


def weights_of(recipe: fm.Recipe) -> dict[str, torch.Tensor]:
    return build_model(recipe.model, 0).state_dict()


def test_a_part_of_the_model_starts_from_single_task_training_on_the_other_problem(file):
    events: list[Any] = []
    recipe = pretrained(fm.load_recipe(file), events.append)
    other = compare_problem.recipe(seed=7)
    trained = fm.SingleTask().fit(
        other.problem.with_target("aux"),
        model=other.model,
        optimizer=fm.OptimizerOf("Adam", lr=0.05),
        steps=6,
        seed=7,
        threads=1,
    )
    found, fresh = weights_of(recipe), build_model(plain_net, 0).state_dict()
    for name, tensor in found.items():
        source = trained.model.state_dict() if name.startswith("body.") else fresh
        assert torch.equal(tensor, source[name]), name
    first, *rest = events
    assert first == PretrainingProgress(name=PROBLEM, step=0, steps=6, begins=True)
    assert rest[-1] == replace(first, step=6, begins=False)


def test_it_is_done_once_and_then_found_whatever_asks(file):
    first = weights_of(pretrained(fm.load_recipe(file)))
    events: list[Any] = []
    again = pretrained(fm.load_recipe(file), events.append)
    assert events == []
    copied = pickle.loads(pickle.dumps(again.model))
    lazily = fm.load_recipe(file).model  # nobody called `pretrained` for it
    for factory in (again.model, copied, lazily):
        made = build_model(factory, 0).state_dict()
        assert all(torch.equal(made[name], tensor) for name, tensor in first.items())
    assert len(list(cache_folder("pretrained").glob("*.lock"))) == 1


def test_damaged_weights_are_noticed_and_made_again(file):
    first = weights_of(pretrained(fm.load_recipe(file)))
    (model,) = cache_folder("pretrained").glob("*/model.safetensors")
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    events: list[Any] = []
    again = weights_of(pretrained(fm.load_recipe(file), events.append))
    assert events[0].is_warning
    assert events[0].text.startswith("the pre-training is done again: the model in")
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


def test_weights_that_another_user_may_have_put_there_are_not_loaded(file):
    pretrained(fm.load_recipe(file))
    assert cache_folder("pretrained").stat().st_mode & 0o777 == 0o700
    cache_folder("pretrained").chmod(0o777)
    with pytest.raises(fm.StoreError, match=r"forkmerge/pretrained can be written by other users"):
        pretrained(fm.load_recipe(file))


def test_stopped_half_way_it_goes_on_to_the_same_bits(file, monkeypatch, tmp_path):
    compare_problem.stop_at.append((7, 4))
    with pytest.raises(Stopped):
        pretrained(fm.load_recipe(file))
    (folder,) = (path for path in cache_folder("pretrained").iterdir() if path.is_dir())
    assert list((folder / "checkpoints").iterdir())
    compare_problem.stop_at.append((7, 1))  # a run that started over would stop again
    events: list[Any] = []
    found = weights_of(pretrained(fm.load_recipe(file), events.append))
    assert compare_problem.stop_at.pop() == (7, 1)
    assert [event.step for event in events if event.begins] == [4]
    assert not (folder / "checkpoints").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    whole = weights_of(pretrained(fm.load_recipe(file)))
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_what_cannot_be_continued_is_begun_anew(file):
    compare_problem.stop_at.append((7, 4))
    with pytest.raises(Stopped):
        pretrained(fm.load_recipe(file))
    (config,) = cache_folder("pretrained").glob("*/config.json")
    config.write_text("{")
    events: list[Any] = []
    pretrained(fm.load_recipe(file), events.append)
    texts = [event.text for event in events if isinstance(event, Notice) and event.is_warning]
    assert any(text.startswith("the pre-training is begun anew: ") for text in texts)


def test_who_comes_second_waits_for_the_first(file):
    asked = fm.load_recipe(file).model.pretraining
    key, _ = find_weights(asked)
    events: list[Any] = []
    seen = threading.Event()

    def watch(event: Any) -> None:
        events.append(event)
        seen.set()

    with pretraining._locked(key, asked, events.append):
        second = threading.Thread(target=find_weights, args=(asked, key, watch))
        second.start()
        assert seen.wait(20)
        assert second.is_alive()
    second.join(20)
    assert not second.is_alive()
    assert [event.text for event in events] == [f"another process is pre-training on {PROBLEM}: waiting for it"]


def test_the_key_is_made_from_settings_code_and_data(file, monkeypatch):
    def key(old: str = "", new: str = "") -> str:
        file.write_text(TABLE.format(extra="").replace(old, new))
        return content_key(fm.load_recipe(file).model.pretraining.recipe())

    first = key()
    assert key() == first
    assert key('part = "body"', 'part = "heads"') == first, "any part can be taken from the same weights"
    others = [key("steps = 6", "steps = 5"), key("seed = 7", "seed = 8"), key("lr = 0.05", "lr = 0.04")]
    real = compare_problem.examples
    monkeypatch.setattr(compare_problem, "examples", lambda count, seed: real(count, seed + 100))
    others.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(compare_problem, "shared_losses", lambda *given: {t: 2 * v for t, v in losses(*given).items()})
    losses = __import__("problems").shared_losses
    others.append(key())
    assert len({first, *others}) == 6


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('part = "body"', 'part = "encoder"', r"unknown part of the model 'encoder'.* Known: body, heads"),
        ('part = "body"', "part = 5", "part must be the name of a submodule, got 5"),
        ("seed = 7", "sead = 7", r"\[pretrain\]: unknown key 'sead'. Did you mean 'seed'"),
        ('recipe = "compare_problem:recipe"\ntarget', "target", "needs recipe = 'module:function'"),
    ],
)
def test_what_a_table_cannot_ask_for_is_refused_by_name(old, new, message, file):
    file.write_text(TABLE.format(extra="").replace(old, new))
    with pytest.raises(fm.ConfigError, match=message):
        pretrained(fm.load_recipe(file))
    assert not list(cache_folder("pretrained").glob("*/result.json")), "it was trained before it was refused"


def test_weights_that_do_not_fit_are_named():
    weights = plain_net().state_dict()
    del weights["body.0.bias"]
    weights["body.0.weight"], weights["body.9.scale"] = torch.zeros(2, 3), torch.zeros(1)
    with pytest.raises(fm.ConfigError) as error:
        load_part(plain_net(), weights, "body")
    for text in (
        "body.0.bias is missing",
        "body.9.scale is not expected",
        "body.0.weight is (2, 3) and not (8, 6)",
    ):
        assert text in str(error.value)
    with pytest.raises(fm.ConfigError, match=r"unknown part of the pre-trained model 'body'\. Known: trunk"):
        load_part(plain_net(), {"trunk.weight": torch.zeros(1)}, "body")


def test_a_dry_run_trains_nothing(file):
    recipe = fm.load_recipe(file)
    assert estimate_run(recipe).parameters == sum(p.numel() for p in plain_net().parameters())
    assert not cache_folder("pretrained").exists()
    assert isinstance(recipe.model, Pretrained)
    assert not isinstance(first_model(replace(recipe.model, model=plain_net())), Pretrained)


def test_comparisons_pretrain_once_before_their_runs_in_any_process(file, tmp_path):
    found = {}
    for workers in (1, 2):
        events: list[Any] = []
        comparison = plan_comparison(file, methods="ew", seeds=1)
        run_comparison(comparison, tmp_path / f"out{workers}", workers=workers, on_event=events.append)
        kinds = [type(event) for event in events]
        assert (PretrainingProgress in kinds) == (workers == 1)
        assert JobStarted not in kinds[: kinds.index(JobsPlanned)]
        found[workers] = [(o.method, o.metrics) for o in read_run_results(tmp_path / f"out{workers}")]
    assert found[1] == found[2]
    assert len(read_plan(tmp_path / "out1")["pretrained"]) == 32
    file.write_text('recipe = "compare_problem:recipe"\nsteps = 4\n')
    run_comparison(plan_comparison(file, methods="ew", seeds=1), tmp_path / "plain")
    assert [(o.method, o.metrics) for o in read_run_results(tmp_path / "plain")] != found[1]
