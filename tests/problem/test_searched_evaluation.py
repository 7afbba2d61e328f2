"""What searches see of validation data: the metric they go by, and how many of the examples."""

from __future__ import annotations

from dataclasses import replace

import pytest

import forkmerge as fm
from forkmerge.problem.searched_evaluation import (
    SearchedEvaluation,
    check_search_by,
    measured_by,
    of_every_example,
    reported_directions,
    search_directions,
    searched_by,
    with_sample,
    with_search_metric,
)
from problems import evaluation, minus_loss, shared_problem


def test_without_one_a_search_goes_by_all_that_is_reported() -> None:
    problem = shared_problem(metrics={"accuracy": fm.accuracy, "loss": fm.nll})
    assert searched_by(problem, None, None, 0).target_validation is problem.target_validation
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
    searched = searched_by(problem, "nll", 5, 0)
    assert searched.evaluations("validation")["aux"] is problem.evaluations("validation")["aux"]
    assert list(searched.target_validation.metrics) == ["minus_loss", "nll"]


def test_a_sample_is_drawn_from_the_seed_and_all_examples_stay_to_be_reported_and_trained_on() -> None:
    own = evaluation(metrics={"hits": fm.accuracy})
    sample = with_sample(own, 7, seed=1)
    assert isinstance(sample, SearchedEvaluation)
    assert (sample.size, sample.every, sample.as_training) == (7, own.dataset, own.dataset)
    rows = {tuple(row.tolist()) for row in own.dataset[:][0]}
    drawn = [tuple(row.tolist()) for row in sample.dataset[:][0]]
    assert len(set(drawn)) == 7
    assert rows.issuperset(drawn)
    again, other = with_sample(own, 7, seed=1), with_sample(own, 7, seed=2)
    assert again.dataset[:][0].equal(sample.dataset[:][0])
    assert not other.dataset[:][0].equal(sample.dataset[:][0])
    assert of_every_example(sample).dataset is own.dataset
    assert of_every_example(own) is own


def test_a_sample_of_all_examples_or_more_is_no_sample() -> None:
    own = evaluation()
    assert with_sample(own, own.size, 0) is own
    assert with_sample(own, own.size + 1, 0) is own


def test_a_sample_keeps_the_metric_that_is_searched_by() -> None:
    searched = searched_by(shared_problem(metrics=fm.accuracy), "nll", 5, 0).target_validation
    assert (searched.size, search_directions(searched), reported_directions(searched)) == (
        5,
        {"nll": -1},
        {"accuracy": 1},
    )
    assert list(of_every_example(searched).metrics) == ["accuracy", "nll"]


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
