"""A round's search again, from its saved branches, with something changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import forkmerge as fm
from forkmerge.analysis import combinations, replayed_search
from problems import (
    SGD,
    evaluation,
    fit,
    minus_loss,
    noisy_net,
    plain_net,
    shared_problem,
)

BRANCHES = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 1.0}, "odd": {"tgt": 1.0, "odd": 1.0}}


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
    score = saved._scores.scorer(saved.evaluation, [3, 5, 8])
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
