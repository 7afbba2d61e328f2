"""Combinations of models, records over rounds, and questions to a merge."""

from __future__ import annotations

import builtins
import math
from dataclasses import dataclass, replace

import pytest
import torch

import forkmerge as fm
from forkmerge.analysis import combinations, dynamics, feature_map, replayed_search
from forkmerge.experiments.summary import Cost, Standing, Summary
from problems import (
    SGD,
    Point,
    evaluation,
    fit,
    minus_loss,
    noisy_net,
    plain_net,
    quadratic_problem,
    shared_problem,
)

BRANCHES = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 1.0}, "odd": {"tgt": 1.0, "odd": 1.0}}
PLANE = {"a": (0.0, 0.0), "b": (2.0, 0.0), "c": (1.0, 3.0)}


def at(*theta):
    return {"theta": torch.tensor(theta, dtype=torch.float64)}


def states():
    return {name: at(*theta) for name, theta in PLANE.items()}


def loss(x, y, goal=(1.0, 0.5)):
    return 0.5 * ((x - goal[0]) ** 2 + (y - goal[1]) ** 2)


PROBLEM = quadratic_problem({"tgt": (5.0, 5.0), "aux": (0.0, 0.0)}, (1.0, 0.5))


def test_gains_of_a_triangle_are_those_of_the_merged_models():
    model = Point((9.0, 9.0))
    found = combinations.combination_gains(model, PROBLEM, states(), resolution=4)
    assert len(found.coefficients) == 15
    assert model.theta.tolist() == [9.0, 9.0]
    for (a, b, c), gain in zip(found.coefficients, found.gains, strict=True):
        assert a + b + c == pytest.approx(1)
        assert gain == pytest.approx(loss(0, 0) - loss(2 * b + c, 3 * c))
    assert found.coefficients[found.best] == (0.5, 0.25, 0.25)  # of two that are as near to the goal the first


def test_a_line_of_two_models_ends_in_both():
    two = {name: states()[name] for name in ("a", "b")}
    found = combinations.combination_gains(Point(), PROBLEM, two, resolution=2)
    assert found.coefficients == ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0))
    with pytest.raises(fm.ProblemError, match="two or three"):
        combinations.combination_gains(Point(), PROBLEM, {"a": at(0.0, 0.0)})


def test_the_loss_along_a_line_has_a_barrier_only_where_it_rises_above_its_ends():
    two = {"a": at(0.0, 0.0), "b": at(2.0, 0.0)}
    found = combinations.loss_line(Point(), PROBLEM, two, points=5)
    assert found.positions == pytest.approx((0, 0.25, 0.5, 0.75, 1))
    # The loss is measured on validation examples by the target's own loss, here the distance to the goal.
    assert found.losses == pytest.approx([loss(2 * p, 0) for p in found.positions])
    assert found.barrier == 0
    assert found.scores == pytest.approx([-value for value in found.losses])


def test_the_plane_through_three_models_has_their_distances_and_the_right_losses():
    found = combinations.loss_plane(
        Point(), PROBLEM, states(), marks={"merge": {"a": 0.2, "b": 0.3, "c": 0.5}}, points=3
    )
    assert [v for corner in found.corners for v in corner] == pytest.approx([0, 0, 2, 0, 1, 3])
    assert found.marks["merge"] == pytest.approx((0.3 * 2 + 0.5, 1.5))
    for y, row in zip(found.ys, found.losses, strict=True):
        assert row == pytest.approx([loss(x, y) for x in found.xs])
    with pytest.raises(fm.ProblemError, match="lie on a line"):
        combinations.loss_plane(Point(), PROBLEM, {"a": at(0.0, 0.0), "b": at(1.0, 1.0), "c": at(2.0, 2.0)})


def test_coefficients_over_rounds_are_means_over_runs():
    runs = [fit(fm.ForkMerge(BRANCHES, interval=4), seed=seed) for seed in (0, 1)]
    found = dynamics.coefficient_history(runs)
    assert found.steps == (4, 8, 12)
    for i in range(3):
        values = [run.searched[i].coefficients["joint"] for run in runs]
        assert found.means["joint"][i] == pytest.approx(sum(values) / 2)
        assert found.stds["joint"][i] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
        assert found.relevance["tgt"][i] == pytest.approx(1)
    curve = dynamics.learning_curve("ForkMerge", runs)
    assert curve.means[-1] == pytest.approx(sum(run.score for run in runs) / 2)
    effect = dynamics.interval_effect({4: runs, 2: [fit(fm.ForkMerge(BRANCHES, interval=2))]})
    assert effect.intervals == (2, 4)
    assert effect.runs == (1, 2)
    diverged = replace(runs[1], score=math.nan)
    assert math.isnan(dynamics.interval_effect({4: [runs[0], diverged]}).means[0])
    with pytest.raises(fm.ProblemError, match="share the steps"):
        dynamics.coefficient_history([runs[0], fit(fm.ForkMerge(BRANCHES, interval=2))])


def test_curves_of_several_metrics_are_changes_against_one_baseline():
    problem = shared_problem(metrics={"nll": fm.nll, "accuracy": fm.accuracy})
    directions = problem.target_validation.directions
    alone = [fit(fm.SingleTask(interval=4), problem, seed=seed) for seed in (0, 1)]
    joint = [fit(fm.Joint(interval=4), problem, seed=seed) for seed in (0, 1)]
    criterion = dynamics.common_criterion(directions, alone)
    base = {name: (alone[0].metrics[name] + alone[1].metrics[name]) / 2 for name in directions}

    def change(metrics):
        return sum(sign * (metrics[name] / base[name] - 1) for name, sign in directions.items()) / 2

    curve = dynamics.learning_curve("EW", joint, criterion)
    for place, mean in enumerate(curve.means):
        assert mean == pytest.approx(sum(change(run.searched[place].metrics) for run in joint) / 2)
    assert dynamics.learning_curve("STL", alone, criterion).means[-1] == pytest.approx(0, abs=1e-12)
    effect = dynamics.interval_effect({4: joint}, criterion=criterion)
    assert effect.means[0] == pytest.approx(sum(change(run.metrics) for run in joint) / 2)
    for look in (lambda: dynamics.learning_curve("EW", joint), lambda: dynamics.interval_effect({4: joint})):
        with pytest.raises(fm.ProblemError, match=r"several metrics \(nll, accuracy\).* criterion=common_criterion"):
            look()
    with pytest.raises(fm.ProblemError, match="the baseline has no run"):
        dynamics.common_criterion(directions, [])


@dataclass(frozen=True)
class GridPoint:
    task_weights: dict
    scores: dict


def test_a_projection_marks_the_front_of_the_grid_and_costs_come_from_the_summary():
    grid = [GridPoint({"a": 1, "b": w}, {"a": 1 - w, "b": w}) for w in (0.25, 0.75)]
    found = dynamics.pareto_projection("a", "b", grid, {"good": {"a": 0.9, "b": 0.6}, "bad": {"a": 0.1, "b": 0.1}})
    assert [(p.label, p.is_front, p.is_grid) for p in found.points] == [
        ("1 : 0.25", True, True),
        ("1 : 0.75", True, True),
        ("good", False, False),
        ("bad", False, False),
    ]
    bare = dynamics.pareto_projection("a", "b", [], {"good": {"a": 0.9, "b": 0.6}, "bad": {"a": 0.1, "b": 0.1}})
    assert [p.is_front for p in bare.points] == [True, False]
    standing = Standing("ew", "EW", {}, None, None, None, None)
    costs = {"ew": Cost(1, None, 1.5, None, 0.0)}
    (cost,) = dynamics.method_costs(Summary("STL", 0.95, [0], "test", False, {}, {}, [standing], costs))
    assert (cost.label, cost.time, cost.change) == ("EW", 1.5, None)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A finished run with its branches, and the recipe it was made with."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    recipe = fm.Recipe(
        shared_problem(metrics=fm.nll),
        model=noisy_net,
        optimizer=SGD,
        steps=8,
        algorithm=fm.ForkMerge(BRANCHES, interval=4, keep_branches=True),
        options={"threads": 1},
    )
    return folder, recipe, recipe.fit(folder=folder)


def test_a_replay_of_nothing_finds_the_recorded_merge(kept):
    folder, recipe, run = kept
    for index in (1, 2):
        found = replayed_search.open_round(folder, recipe, index).replay()
        assert found.question == "nothing"
        assert found.chosen == run.searched[index - 1].coefficients
        assert found.score == pytest.approx(run.searched[index - 1].score, abs=1e-6)
        assert found.recorded_score == found.score
        for name, branch in run.searched[index - 1].branches.items():
            assert found.branch_scores[name] == pytest.approx(branch.score, abs=1e-6)


def test_a_replay_with_another_search_metric_or_data_uses_them(kept):
    folder, recipe, _ = kept
    saved = replayed_search.open_round(folder, recipe, 2)
    fixed = saved.replay(search=fm.Fixed((0.5, 0.25, 0.25)))
    assert tuple(fixed.chosen.values()) == (0.5, 0.25, 0.25)
    assert fixed.question == "another search"
    assert saved.replay(metrics=fm.accuracy).score in {k / 24 for k in range(25)}
    other = evaluation(metrics=fm.nll, seed=77)
    found = saved.replay(evaluation=other, search="grid")
    assert found.question == "another search, data"
    assert found.score >= max(found.branch_scores.values())
    half = saved.replay(indices=range(12))
    assert half.score != saved.replay().score


def test_scores_on_some_examples_are_those_of_a_pass_over_them(kept):
    folder, recipe, _ = kept
    saved = replayed_search.open_round(folder, recipe, 1)
    score = saved._scorer(saved.evaluation, [3, 5, 8])
    binding = saved.blend.binding
    binding.attach_weights(saved.blend((0.5, 0.5, 0.0)))
    direct = -fm.measure(binding.model, saved.evaluation, indices=[3, 5, 8])["nll"]
    assert score((0.5, 0.5, 0.0)) == pytest.approx(direct, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "options"),
    [({"search_examples": 18}, {"seed": 2}), ({"bn": "recompute", "bn_batches": 2}, {"precision": "bfloat16"})],
)
def test_a_replay_searches_and_measures_as_the_run_did(kept, tmp_path, settings, options):
    _, recipe, _ = kept
    recipe = replace(recipe, algorithm=replace(recipe.algorithm, **settings))
    run = recipe.fit(folder=tmp_path / "run", **options)
    for finished in run.searched:
        found = replayed_search.open_round(tmp_path / "run", recipe, finished.index).replay()
        assert found.chosen == finished.coefficients
        assert found.score == pytest.approx(finished.score, abs=1e-7)


def test_the_model_of_a_round_lies_where_the_recipe_trains(kept, monkeypatch):
    folder, recipe, _ = kept
    placed = []
    monkeypatch.setattr(replayed_search, "place_model", lambda model, devices: placed.extend(devices))
    replayed_search.open_round(folder, replace(recipe, options={"devices": ["cpu"]}), 1)
    assert placed == [torch.device("cpu")]


def test_a_faulty_branch_stays_out_of_a_replay(kept):
    folder, recipe, _ = kept
    saved = replayed_search.open_round(folder, recipe, 2)
    heaviest = max(saved.record.coefficients, key=saved.record.coefficients.get)
    branches = saved.record.branches | {heaviest: replace(saved.record.branches[heaviest], fault="diverged")}
    saved.record = replace(saved.record, branches=branches)
    assert saved.replay().chosen[heaviest] == 0


def error(predictions, targets):
    return -minus_loss(predictions, targets)


def test_metrics_of_a_replay_keep_or_get_their_direction(kept):
    folder, recipe, _ = kept
    saved = replayed_search.open_round(folder, recipe, 2)
    plain = saved.replay()
    for found in (
        saved.replay(metrics={"nll": error}),
        saved.replay(metrics=error, higher_is_better={"error": False}),
    ):
        assert found.question == "another metric"
        assert found.chosen == plain.chosen
        assert found.score == pytest.approx(plain.score, abs=1e-6)
    assert saved.replay(higher_is_better={"nll": True}).score >= -plain.score
    with pytest.raises(fm.ProblemError, match="higher_is_better"):
        saved.replay(metrics=error, higher_is_better={"nll": False})


def test_lines_and_planes_go_through_the_branches_of_a_round(kept):
    folder, recipe, run = kept
    saved = replayed_search.open_round(folder, recipe, 2)
    plain = saved.replay()
    line = combinations.loss_line(saved.model, saved.problem, saved.weights("alone", "merge"), points=3)
    assert line.names == ("alone", "merge")
    assert line.scores[-1] == pytest.approx(plain.recorded_score, abs=1e-6)
    gains = combinations.combination_gains(saved.model, saved.problem, saved.weights(), resolution=5)
    for name, point in zip(saved.names, ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)), strict=True):
        assert gains.scores[gains.coefficients.index(point)] == pytest.approx(plain.branch_scores[name], abs=1e-6)
    plane = combinations.loss_plane(
        saved.model, saved.problem, saved.weights(), marks={"merge": run.searched[1].coefficients}, points=2
    )
    assert set(plane.marks) == {"merge"}
    assert saved.replay() == plain
    with pytest.raises(fm.ProblemError, match="Known: alone, joint, odd"):
        saved.weights("alone", "jont")


def test_a_branch_taken_away_leaves_the_others_scaled_up(kept):
    folder, recipe, run = kept
    saved = replayed_search.open_round(folder, recipe, 2)
    coefficients = run.searched[1].coefficients
    branch = max(coefficients, key=coefficients.get)
    found = saved.without(branch)
    assert found.coefficients[branch] == 0
    assert found.score == pytest.approx(run.searched[1].score, abs=1e-6)
    assert found.searched <= found.score + 1e-9
    rest = 1 - coefficients[branch]
    if rest:
        scaled = tuple(0.0 if name == branch else value / rest for name, value in coefficients.items())
        assert found.without == pytest.approx(saved._scorer(saved.evaluation, None)(scaled))
    with pytest.raises(fm.ProblemError, match="Known: alone, joint, odd"):
        saved.without("jont")


def test_survival_measures_a_choice_on_examples_it_was_not_made_on(kept):
    folder, recipe, _ = kept
    saved = replayed_search.open_round(folder, recipe, 2)
    found = saved.survival(splits=3)
    assert len(found.seen) == len(found.unseen) == 6
    assert all(gain >= -1e-9 for gain in found.seen)  # the target alone is a candidate
    assert found.mean_unseen <= found.mean_seen + 1e-9 or found.kept > 1
    assert found.baseline == "alone"
    assert found == saved.survival(splits=3)


def test_a_round_that_was_not_kept_is_named(kept, tmp_path):
    folder, recipe, _ = kept
    with pytest.raises(fm.StoreError, match="no searched round 7: it has 1 to 2"):
        replayed_search.open_round(folder, recipe, 7)
    other = replace(recipe, problem=replace(recipe.problem, target="aux", validation={"aux": evaluation()}))
    with pytest.raises(fm.StoreError, match="target 'tgt', the recipe's is 'aux'"):
        replayed_search.open_round(folder, other, 1)
    fit(fm.ForkMerge(BRANCHES, interval=4), folder=tmp_path / "run")
    other = replace(recipe, model=plain_net, problem=shared_problem())
    with pytest.raises(fm.StoreError, match="keeps no branches of round 1"):
        replayed_search.open_round(tmp_path / "run", other, 1)


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


def test_features_are_what_enters_the_last_layer_and_the_classes():
    model, batch = plain_net(), tuple(part[:5] for part in shared_problem().stream_map["all"].dataset.tensors)
    entered, classes = feature_map.last_layer_inputs(evaluation())(model, batch)
    first = model.body[0]
    assert torch.equal(entered, torch.tanh(batch[0] @ first.weight.T + first.bias))
    assert torch.equal(classes, batch[1][:, 0])
    assert not any(module._forward_pre_hooks for module in model.modules())
    tokens, named = torch.rand(5, 2, 8), fm.Evaluation(batch, fm.accuracy, lambda model, x: (model(input=x), classes))
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
