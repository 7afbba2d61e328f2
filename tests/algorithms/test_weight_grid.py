"""The grid over task weights: every point is plain joint training, the best is kept, the front is the front."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run
from forkmerge.algorithms.events import PhaseStarted, StepProgress
from forkmerge.algorithms.saved_run import read_run
from forkmerge.algorithms.weight_grid import GridRun, Point
from problems import TASKS, Stopped, counting_steps, examples, fit, minus_loss, noisy_net, seeded, shared_problem


def predict_task(model: torch.nn.Module, batch: Any, task: str) -> tuple[Any, Any]:
    inputs, labels = batch
    return model(inputs, task), labels[:, TASKS.index(task)]


def wrong(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return 1.1 - fm.accuracy(predictions, targets)


def largest(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return predictions.abs().max().item()


def two_tasks(metrics: Any = minus_loss, **options: Any) -> fm.Problem:
    """The target and one auxiliary, both with validation data."""
    evaluations = {
        task: fm.Evaluation(TensorDataset(*examples(24, 2)), metrics, partial(predict_task, task=task), **options)
        for task in ("tgt", "aux")
    }
    problem = shared_problem(validation=evaluations)
    stream = problem.stream_map["all"]
    return fm.Problem("tgt", {"all": fm.Stream(stream.dataset, stream.losses, ("tgt", "aux"), 8)}, evaluations)


GRID = fm.WeightGrid(values=(0.3, 3))


def test_every_point_is_joint_training_with_its_weights():
    problem = two_tasks()
    run = fit(GRID, problem, noisy_net)
    assert [tuple(point.task_weights.values()) for point in run.points] == [(0.3, 0.3), (0.3, 3), (3, 0.3), (3, 3)]
    best = max(run.points, key=lambda point: point.scores["tgt"])
    for point in run.points:
        alone = fit(fm.Joint(point.task_weights), problem, noisy_net)
        assert point.metrics["tgt"] == alone.metrics
        for task, evaluation in problem.evaluations("validation").items():
            assert point.metrics[task] == fm.measure(alone.model, evaluation, seed=0)
        if point is best:
            assert_same_bits(run, alone)
            assert run.metrics == alone.metrics


def test_three_tasks_and_three_values_are_27_runs():
    run = fit(fm.WeightGrid(), steps=1)
    assert len(run.points) == len({tuple(point.task_weights.values()) for point in run.points}) == 27
    assert run.notes[-1].startswith("best of 27 combinations of task weights on validation: tgt ")


def test_processes_and_folders_give_the_same_bits(tmp_path):
    problem = two_tasks()
    here = fit(GRID, problem, noisy_net)
    there = fit(GRID, problem, noisy_net, workers=2, folder=tmp_path / "run")
    assert_same_bits(here, there)
    assert here.points == there.points
    assert len(list((tmp_path / "run").glob("*/result.json"))) == 4


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_grid_stopped_anywhere_goes_on(tmp_path, stop, monkeypatch):
    problem, seen = two_tasks(), []

    def observe(event):
        seen.append(type(event))
        if seen.count(PhaseStarted) == stop and isinstance(event, StepProgress):
            raise Stopped

    with pytest.raises(Stopped):
        fit(GRID, problem, folder=tmp_path / "run", on_event=observe, checkpoint_every=1)
    finished = len(list((tmp_path / "run").glob("*/result.json")))
    assert finished == stop - 1
    with counting_steps(monkeypatch) as trained:
        again = fit(GRID, problem, folder=tmp_path / "run", resume=True, checkpoint_every=1)
    assert len(trained) < 12 * (4 - finished) + 1  # a segment is one step here, and finished points have none
    whole = fit(GRID, problem, checkpoint_every=1)
    assert_same_run(again, whole)


def test_a_finished_grid_is_returned_without_training(tmp_path, monkeypatch):
    problem = two_tasks()
    first = fit(GRID, problem, folder=tmp_path / "run")
    with counting_steps(monkeypatch) as trained:
        again = fit(GRID, problem, folder=tmp_path / "run", resume=True)
    assert not trained
    assert_same_bits(first, again)
    assert (first.points, first.to_json()) == (again.points, again.to_json())
    assert read_run(tmp_path / "run").algorithm == "WeightGrid"


def test_a_refit_trains_the_best_weights_on_all_labels():
    problem = two_tasks()
    searched = fit(GRID, problem)
    refitted = fit(fm.WeightGrid(values=(0.3, 3), refit=True), problem)
    best = max(searched.points, key=lambda point: point.scores["tgt"])
    assert_same_bits(refitted, fit(fm.Joint(best.task_weights, refit=True), problem))
    assert refitted.points == searched.points
    assert refitted.score == searched.score
    assert refitted.final == "refit"


def test_several_metrics_are_scored_against_equal_weights():
    problem = two_tasks({"accuracy": fm.accuracy, "wrong": wrong}, higher_is_better={"wrong": False})
    run = fit(fm.WeightGrid(values=(1, 3)), problem)
    equal = run.points[0]
    assert equal.task_weights == {"tgt": 1.0, "aux": 1.0}
    assert equal.scores == {"tgt": 0.0, "aux": 0.0}
    for point in run.points:
        change = (point.metrics["tgt"]["accuracy"] - equal.metrics["tgt"]["accuracy"]) / equal.metrics["tgt"][
            "accuracy"
        ]
        other = (equal.metrics["tgt"]["wrong"] - point.metrics["tgt"]["wrong"]) / equal.metrics["tgt"]["wrong"]
        assert point.scores["tgt"] == pytest.approx((change + other) / 2)


def test_a_point_without_a_finite_score_is_kept_in_the_record_and_not_on_the_front():
    problem = two_tasks({"largest": largest})
    limit = sorted(point.scores["aux"] for point in fit(GRID, problem).points)[1]
    sick = {"largest": lambda p, t: math.nan if largest(p, t) > limit else largest(p, t)}
    evaluations = problem.evaluations("validation")
    evaluations["aux"] = replace(evaluations["aux"], metrics=sick)
    run = fit(GRID, replace(problem, validation=evaluations))
    bad = [point for point in run.points if point.scores["aux"] == -math.inf]
    assert len(bad) == 2
    assert run.front
    assert not any(point in run.front for point in bad)
    assert GridRun.from_json(run.to_json()).front == run.front


def brute_force(points: list[dict[str, float]]) -> list[int]:
    front = []
    for index, point in enumerate(points):
        if any(math.isnan(value) or math.isinf(value) for value in point.values()):
            continue
        beaten = False
        for other in points:
            if any(math.isnan(value) or math.isinf(value) for value in other.values()):
                continue
            pairs = [(other[name], point[name]) for name in point]
            beaten = beaten or (min(a - b for a, b in pairs) >= 0 and max(a - b for a, b in pairs) > 0)
        front += [] if beaten else [index]
    return front


coordinate = st.one_of(st.integers(-2, 2).map(float), st.just(math.nan), st.just(-math.inf))


@given(st.lists(st.fixed_dictionaries({"a": coordinate, "b": coordinate, "c": coordinate}), max_size=8))
def test_the_front_is_what_nobody_dominates(points):
    assert fm.pareto_front(points) == brute_force(points)


def test_equal_points_share_the_front():
    assert fm.pareto_front([{"a": 1.0}, {"a": 1.0}, {"a": 0.0}]) == [0, 1]
    assert fm.pareto_front([]) == []


def test_points_survive_json():
    point = Point({"tgt": 1.0}, {"tgt": {"m": math.nan}}, {"tgt": -math.inf})
    run = fit(GRID, two_tasks(), steps=1)
    run.points = [point]
    back = GridRun.from_json(run.to_json()).points[0]
    assert back.scores == point.scores
    assert math.isnan(back.metrics["tgt"]["m"])


@pytest.mark.parametrize("values", [(), (0.0, 1.0), (-1.0,), (math.nan,), "abc", 3])
def test_values_that_are_no_weights_are_refused(values):
    with pytest.raises(fm.ProblemError, match="values must be positive task weights"):
        fm.WeightGrid(values=values)


def test_a_problem_that_cannot_reach_the_processes_is_refused():
    problem = two_tasks(lambda predictions, targets: 1.0)
    with pytest.raises(fm.ProblemError, match="worker processes need a problem"):
        fit(GRID, problem, workers=2)


def test_the_module_given_holds_the_best_weights():
    model = seeded(noisy_net)
    run = fit(GRID, two_tasks(), model)
    assert run.model is model
