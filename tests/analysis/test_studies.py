"""Transfer gains and discrepancies measured by training are those of runs done by hand."""

from __future__ import annotations

from functools import partial

import pytest

import forkmerge as fm
from compare_problem import recipe
from forkmerge.analysis import heldout, studies, transfer, transfer_runs
from problems import Point, quadratic_problem

CENTRES = {"tgt": (1.0, 0.0), "one": (1.0, 1.0), "two": (-1.0, 0.5)}


def gain(weight, *gains):
    return transfer.transfer_gain(dict(enumerate(gains)), dict.fromkeys(range(len(gains)), 0.0), weight)


def test_measured_gains_are_those_of_runs_done_by_hand():
    curves = studies.measure_transfer(recipe, ["aux"], weights=(0.5, 1.0), seeds=(0, 1), split="test", steps=4)
    by_hand = {}
    for seed in (0, 1):
        r = recipe(seed)
        for weight in (0.0, 0.5):
            algorithm = fm.Joint({"tgt": 1.0, "aux": weight} if weight else {"tgt": 1.0}, interval=2)
            run = algorithm.fit(r.problem, model=r.model, optimizer=r.optimizer, steps=4, seed=seed, threads=1)
            by_hand[seed, weight] = fm.measure(run.model, r.problem.evaluations("test")["tgt"], seed=seed)
    base = {name: (by_hand[0, 0.0][name] + by_hand[1, 0.0][name]) / 2 for name in ("accuracy", "loss")}
    for seed, found in zip((0, 1), curves["aux"].at(0.5).gains, strict=True):
        ours, theirs = by_hand[seed, 0.5], by_hand[seed, 0.0]
        up = (ours["accuracy"] - theirs["accuracy"]) / base["accuracy"]
        down = (ours["loss"] - theirs["loss"]) / base["loss"]
        assert found == pytest.approx((up - down) / 2)
    assert curves["aux"].seeds == (0, 1)


def test_measured_discrepancies_are_those_of_runs_done_by_hand():
    given = {"weights": (0.5, 1.0), "seeds": (0, 1), "steps": 4}
    found = studies.measure_shift(recipe, ["aux"], **given)["aux"]
    assert [point.weight for point in found.points] == [0.0, 0.5, 1.0]
    curve = studies.measure_transfer(recipe, ["aux"], **given)["aux"]
    assert [point.gain for point in found.points[1:]] == [gain.mean for gain in curve.points]
    for seed in (0, 1):
        r = recipe(seed)
        run = fm.Joint({"tgt": 1.0, "aux": 0.5}, interval=2).fit(
            r.problem, model=r.model, optimizer=r.optimizer, steps=4, seed=seed, threads=1
        )
        expected = heldout.confidence_discrepancy(run.model, r.problem.target_validation)
        assert found.points[1].discrepancies[seed] == pytest.approx(expected)


def test_a_task_without_test_data_or_confidences_is_told_so():
    with pytest.raises(fm.ProblemError, match="pass split='validation'"):
        studies.measure_matrix({"tgt": partial(recipe, test=False)}, seeds=(0,), steps=2)
    with pytest.raises(fm.ProblemError, match="no class scores"):
        studies.measure_shift(point_recipe, weights=(1.0,), seeds=(0,), steps=1)


def point_recipe(seed):
    return fm.Recipe(quadratic_problem(CENTRES, (5.0, -3.0)), Point, fm.OptimizerOf("SGD", lr=0.1), steps=1)


def test_the_matrix_has_a_gain_for_every_pair_and_none_on_its_diagonal():
    source = fm.load_recipe("compare_problem:recipe").source
    recipes = {task: transfer_runs.SeededSource(source, task) for task in ("tgt", "aux")}
    matrix = studies.measure_matrix(recipes, seeds=(0, 1), steps=2)
    assert (matrix.auxiliaries, matrix.targets) == (("aux", "odd", "tgt"), ("tgt", "aux"))
    missing = [[cell is None for cell in row] for row in matrix.cells]
    assert missing == [[False, True], [False, False], [True, False]]
    assert matrix.split == "test"
    ours, alone = (
        transfer_runs.do_transfer_run(transfer_runs.TransferRun(recipes["aux"], 0, a, w, steps=2, test=True))
        for a, w in (("odd", 1.0), ("", 0.0))
    )
    gains = matrix.cells[1][1].gains
    assert gains[0] == pytest.approx(alone.metrics["test"]["loss"] - ours.metrics["test"]["loss"])
