"""Features of the target-only model in two dimensions."""

from __future__ import annotations

import builtins
from dataclasses import replace

import pytest
import torch
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.analysis import feature_map
from forkmerge.problem.made_auxiliaries import merge_auxiliaries
from problems import (
    evaluation,
    plain_net,
    shared_problem,
)


def features(model, batch):
    inputs, labels = batch
    return model.body(inputs), labels[:, 0]


def test_a_feature_map_mixes_training_points_by_weight_and_is_the_same_again():
    pytest.importorskip("sklearn")
    problem, model = shared_problem(), plain_net()
    make = [feature_map.feature_map(model, problem, "aux", features, points=40, weights=(0.0, 1.0)) for _ in range(2)]
    assert make[0] == make[1]
    alone, mixed = make[0].panels
    assert alone.origins.count("auxiliary") == 0
    assert 8 < mixed.origins.count("auxiliary") < 32
    assert mixed.origins.count("held-out") == 24
    assert len(mixed.positions) == len(mixed.classes) == 64
    few = feature_map.feature_map(model, problem, "aux", features, points=10, weights=(1.0,), classes=1)
    assert len(set(few.panels[0].classes)) == 1


def test_auxiliaries_that_are_one_show_the_examples_of_all_of_them():
    pytest.importorskip("sklearn")
    problem, model = shared_problem(), plain_net()
    streams = dict(problem.stream_map)
    (whole,) = streams.values()
    for task, label in (("aux", 1.0), ("odd", -1.0)):  # told apart by their inputs
        inputs = torch.full_like(whole.dataset.tensors[0], label)
        streams[task] = replace(whole, dataset=TensorDataset(inputs, whole.dataset.tensors[1]), tasks=(task,))
    streams["all"] = replace(whole, tasks=("tgt",))
    merged = merge_auxiliaries(replace(problem, streams=streams), "others", ["aux", "odd"])
    seen = []

    def watched(model, batch):
        seen.append(batch[0])
        return features(model, batch)

    feature_map.feature_map(model, merged, "others", watched, points=40, weights=(1.0,))
    assert {-1.0, 1.0} <= {float(row[0]) for row in torch.cat(seen) if row.unique().numel() == 1}


def test_features_are_what_enters_the_last_layer_and_the_classes():
    model, batch = plain_net(), tuple(part[:5] for part in shared_problem().stream_map["all"].dataset.tensors)
    entered, classes = feature_map.last_layer_inputs(evaluation())(model, batch)
    first = model.body[0]
    assert torch.equal(entered, torch.tanh(batch[0] @ first.weight.T + first.bias))
    assert torch.equal(classes, batch[1][:, 0])
    assert not any(module._forward_pre_hooks for module in model.modules())
    tokens, named = (
        torch.rand(5, 2, 8),
        fm.Evaluation(TensorDataset(*batch), fm.accuracy, lambda model, x: (model(input=x), classes)),
    )
    assert torch.equal(feature_map.last_layer_inputs(named)(torch.nn.Linear(8, 3), tokens)[0], tokens.flatten(1))


@pytest.mark.parametrize(
    ("model", "targets", "said"),
    [
        (torch.nn.ReLU(), torch.tensor([0, 1]), "runs no nn.Linear"),
        (torch.nn.Linear(4, 2), torch.tensor([0.0, 1.0]), "no whole-number class per example"),
        (torch.nn.Linear(4, 2), torch.tensor([0, 1, 1]), "no whole-number class per example"),
        (torch.nn.Linear(4, 2), {"tgt": torch.tensor([0, 1])}, "no whole-number class per example"),
    ],
)
def test_a_model_or_task_without_such_features_is_refused_in_words(model, targets, said):
    form = fm.Evaluation([0], fm.accuracy, lambda model, batch: (model(batch), targets))
    with pytest.raises(fm.ProblemError, match=said):
        feature_map.last_layer_inputs(form)(model, torch.rand(2, 4))


def test_a_feature_map_takes_these_features_by_default():
    pytest.importorskip("sklearn")
    given = shared_problem(), "aux"
    found = feature_map.feature_map(plain := plain_net(), *given, points=10, weights=(1.0,))
    assert found == feature_map.feature_map(plain, *given, features, points=10, weights=(1.0,))


def test_without_scikit_learn_a_feature_map_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **options):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(fm.ProblemError, match=r"forkmerge\[analysis\]"):
        feature_map.feature_map(plain_net(), shared_problem(), "aux", features)
