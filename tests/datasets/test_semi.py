"""Few labels and many images without: problems that train, and the paper's recipe."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

import forkmerge as fm
from forkmerge.datasets import semi
from forkmerge.datasets.unlabelled import BASELINES, TASKS
from forkmerge.models import WithTeacher
from unlabelled_images import model, options, splits


class TestProblems:
    @pytest.mark.parametrize("task", TASKS)
    def test_every_task_trains_under_fixed_weights(self, task: str) -> None:
        weights = {"class": 1.0, task: BASELINES.get(task, 0.5)}
        run = fm.Joint(weights).fit(splits().problem([task]), **options(steps=3))
        assert math.isfinite(run.score)

    @pytest.mark.parametrize("method", ["pcgrad", "arml", "gcs", "uw"])
    def test_self_supervision_works_under_any_method(self, method: str) -> None:
        run = fm.Joint(method=method).fit(splits().problem(), **options(steps=3))
        assert math.isfinite(run.score)

    def test_a_model_without_a_teacher_serves_the_other_tasks(self) -> None:
        run = fm.ForkMerge("mixed", interval=2).fit(
            splits().problem(["rotation"]), **options(model=partial(model, teacher=False), steps=4)
        )
        assert run.rounds


class TestRecipe:
    def recipe(self, **changed: Any) -> fm.Recipe:
        arguments = {"network": "small", "steps": 40, "batch_size": 4, "seed": 1, **changed}
        return semi.semi_supervised_recipe(splits(), **arguments)

    def test_the_defaults_are_the_papers(self) -> None:
        recipe = semi.semi_supervised_recipe(splits())
        assert (recipe.steps, recipe.algorithm.interval) == (200_000, 10_000)
        assert recipe.problem.tasks == ("class", "rotation", "exemplar")
        model = recipe.model()
        assert isinstance(model, WithTeacher)
        assert model.decay == 0.95
        optimizer = recipe.optimizer(model)
        scheduler = recipe.options["scheduler"].over(recipe.steps)(optimizer)
        assert (optimizer.defaults["lr"], dict(scheduler.milestones), scheduler.gamma) == (0.005, {160_000: 1}, 0.2)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.46e6, rel=0.01)

    def test_it_may_be_measured_by_its_error_as_the_papers_table_is(self) -> None:
        problem = self.recipe(metric="error").problem
        assert problem.target_validation.directions == {"error": -1}
        model = self.recipe().model()
        accuracy, error = (fm.measure(model, p.target_validation) for p in (self.recipe().problem, problem))
        assert error["error"] == pytest.approx(1 - accuracy["accuracy"])
        with pytest.raises(fm.ProblemError, match="unknown metric 'eror'"):
            self.recipe(metric="eror")

    def test_schedule_and_merges_follow_the_steps(self) -> None:
        recipe = self.recipe()
        assert (recipe.algorithm.interval, recipe.options["scheduler"].options["milestones"]) == (2, ["80%"])
        assert {stream.batch_size for stream in recipe.problem.stream_map.values()} == {4}

    @pytest.mark.parametrize("auxiliaries", [["pi"], ["mean_teacher"], ["vat"], ["pseudo_label"], semi.S4L])
    def test_it_trains_with_every_kind_of_auxiliary(self, auxiliaries: Any) -> None:
        recipe = self.recipe(auxiliaries=auxiliaries, steps=2)
        run = recipe.fit()
        assert len(run.rounds) == 2
        assert set(run.model.student.heads) == {"class", *({"rotation"} & set(auxiliaries))}

    def test_the_small_network_may_be_narrower(self) -> None:
        sizes = [sum(p.numel() for p in self.recipe(width=width).model().parameters()) for width in (8, 32)]
        assert 10 * sizes[0] < sizes[1]

    def test_an_unknown_network_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="wrn-28-2"):
            self.recipe(network="wrn-28-10")
