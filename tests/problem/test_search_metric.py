"""The metric that a search goes by, where that is not what the target is reported in."""

from __future__ import annotations

from dataclasses import replace

import pytest

import forkmerge as fm
from forkmerge.problem.search_metric import (
    check_search_by,
    measured_by,
    reported_directions,
    search_directions,
    searched_by,
    with_search_metric,
)
from problems import evaluation, minus_loss, shared_problem


def test_without_one_a_search_goes_by_all_that_is_reported() -> None:
    problem = shared_problem(metrics={"accuracy": fm.accuracy, "loss": fm.nll})
    assert searched_by(problem, None) is problem
    directions = {"accuracy": 1, "loss": -1}
    assert search_directions(problem.target_validation) == reported_directions(problem.target_validation) == directions


def test_a_built_in_metric_is_added_and_one_of_the_target_s_is_taken() -> None:
    own = evaluation(metrics={"hits": fm.accuracy})
    for metric in ("nll", fm.nll):
        searched = with_search_metric(own, metric)
        assert searched.metrics == {"hits": fm.accuracy, "nll": fm.nll}
        assert (search_directions(searched), reported_directions(searched)) == ({"nll": -1}, {"hits": 1})
    searched = with_search_metric(own, "hits")
    assert (searched.metrics, search_directions(searched)) == (own.metrics, {"hits": 1})


def test_the_target_s_own_meaning_of_a_name_comes_first() -> None:
    searched = with_search_metric(evaluation(metrics={"nll": minus_loss}), "nll")
    assert searched.metrics == {"nll": minus_loss}


def test_other_options_of_the_evaluation_stay() -> None:
    own = evaluation(metrics={"hits": fm.accuracy, "loss": fm.nll}, batch_size=7, higher_is_better={"hits": False})
    searched = with_search_metric(own, fm.absolute_error)
    assert (searched.batch_size, searched.dataset, searched.predict) == (7, own.dataset, own.predict)
    assert searched.directions == {"hits": -1, "loss": -1, "absolute_error": -1}
    part = measured_by(searched, ["loss"])
    assert (part.metrics, part.batch_size, part.directions) == ({"loss": fm.nll}, 7, {"loss": -1})
    assert measured_by(searched, ["absolute_error", "loss", "hits"]) is searched


def test_only_the_target_s_validation_changes() -> None:
    problem = shared_problem(validation={"tgt": evaluation(), "aux": evaluation(seed=3)})
    searched = searched_by(problem, "nll")
    assert searched.evaluations("validation")["aux"] is problem.evaluations("validation")["aux"]
    assert list(searched.target_validation.metrics) == ["minus_loss", "nll"]


def test_what_cannot_be_searched_by_is_refused() -> None:
    with pytest.raises(fm.ProblemError, match=r"search_by: .*'nl'.*nll"):
        with_search_metric(evaluation(), "nl")
    with pytest.raises(fm.ProblemError, match="give one of them another name"):
        with_search_metric(evaluation(metrics=fm.nll), replace(fm.nll, count=None))
    for value in (3, ["nll"], {"nll": fm.nll}):
        with pytest.raises(fm.ProblemError, match="search_by must be the name of a metric"):
            check_search_by(value)


def test_a_name_that_is_no_metric_is_refused_when_a_run_starts() -> None:
    with pytest.raises(fm.ProblemError, match="search_by must be"):
        fm.ForkMerge("mixed", search_by=3)
