"""What searches see of the target's validation data, where that is not all: another metric, or fewer examples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch.utils.data import Dataset

from forkmerge.errors import ProblemError, unknown_name
from forkmerge.problem.definition import Evaluation, Metric, Problem
from forkmerge.problem.example_order import sample_indices
from forkmerge.problem.metrics import absolute_error, accuracy, nll
from forkmerge.problem.split_dataset import rows_of

BUILT_IN = {metric.name: metric for metric in (accuracy, nll, absolute_error)}
"""The metrics that have a name of their own."""


@dataclass(frozen=True)
class SearchedEvaluation(Evaluation):
    """An evaluation whose searches go by one of its metrics, or look at some of its examples.

    Args:
        search_by: Name of that metric; empty where searches go by what is reported.
        reported: Names of the metrics that the target is reported in.
        every: All examples, where `dataset` is a sample of them.
    """

    search_by: str = ""
    reported: tuple[str, ...] = ()
    every: Dataset[Any] | None = None


def check_search_by(value: object) -> None:
    """Refuse what cannot be a metric; names are looked up once the target is known."""
    if value is not None and not isinstance(value, str | Metric) and not callable(value):
        raise ProblemError(
            f"search_by must be the name of a metric, such as 'nll', a metric or None, got {value!r}: one metric; "
            "several would need values to compare with."
        )


def searched_by(problem: Problem, metric: Any, examples: int | None, seed: int) -> Problem:
    """Return a problem whose searches go by a metric and look at so many examples; as it is, for each that is None.

    See `with_search_metric` and `with_sample`.
    """
    searched = problem.target_validation
    if metric is not None:
        searched = with_search_metric(searched, metric)
    if examples is not None:
        searched = with_sample(searched, examples, seed)
    return replace(problem, validation={**problem.evaluations("validation"), problem.target: searched})


def with_sample(evaluation: Evaluation, count: int, seed: int) -> Evaluation:
    """Return an evaluation of `count` of the examples, drawn from the seed; a refit still trains on all of them.

    One that has no more is returned as it is.
    """
    if count >= evaluation.size:
        return evaluation
    sample = rows_of(evaluation.dataset, sample_indices(evaluation.size, count, seed, "searched"))
    values = {item.name: getattr(evaluation, item.name) for item in fields(evaluation)}
    values |= {"dataset": sample, "every": evaluation.dataset, "reported": tuple(reported_directions(evaluation))}
    if evaluation.as_training is None:
        values["as_training"] = evaluation.dataset
    return SearchedEvaluation(**values)


def of_every_example(evaluation: Evaluation) -> Evaluation:
    """Return the same evaluation of all examples, where searches look at a sample of them; else as it is."""
    if not isinstance(evaluation, SearchedEvaluation) or evaluation.every is None:
        return evaluation
    return replace(evaluation, dataset=evaluation.every, every=None)


def with_search_metric(evaluation: Evaluation, metric: Any) -> SearchedEvaluation:
    """Return an evaluation whose searches go by a metric, and that is reported in its own.

    Args:
        evaluation: The evaluation.
        metric: One of its metrics or a built-in one, by name, or any metric.
    """
    if isinstance(metric, str):
        named = {**BUILT_IN, **evaluation.metrics}
        if metric not in named:
            raise ProblemError("search_by: " + unknown_name("metric", metric, named))
        name, metric = metric, named[metric]
    else:
        name = getattr(metric, "__name__", type(metric).__name__)
        if name in evaluation.metrics and evaluation.metrics[name] != metric:
            raise ProblemError(
                f"search_by is a metric named {name!r}, and so is another one of the target's: give one of them "
                "another name, e.g. MeanCost(…, name='cost')."
            )
    values = {**_fields(evaluation), "metrics": {**evaluation.metrics, name: metric}}
    return SearchedEvaluation(**values, search_by=name, reported=tuple(evaluation.metrics))


def search_directions(evaluation: Evaluation) -> dict[str, int]:
    """Return +1 or −1 for every metric that a search goes by: all, unless one was chosen."""
    directions = evaluation.directions
    if isinstance(evaluation, SearchedEvaluation) and evaluation.search_by:
        return {evaluation.search_by: directions[evaluation.search_by]}
    return directions


def reported_directions(evaluation: Evaluation) -> dict[str, int]:
    """Return +1 or −1 for every metric that the target is reported in."""
    directions = evaluation.directions
    if isinstance(evaluation, SearchedEvaluation):
        return {name: directions[name] for name in evaluation.reported}
    return directions


def measured_by(evaluation: Evaluation, names: Collection[str]) -> Evaluation:
    """Return the same examples with some of the metrics only."""
    if set(names) == set(evaluation.metrics):
        return evaluation
    said = {name: is_better for name, is_better in evaluation.higher_is_better.items() if name in names}
    return with_metrics(evaluation, {name: evaluation.metrics[name] for name in names}, said)


def with_metrics(evaluation: Evaluation, metrics: Any, higher_is_better: Mapping[str, bool]) -> Evaluation:
    """Return the same examples with other metrics, all of which are reported and searched by."""
    return Evaluation(**{**_fields(evaluation), "metrics": metrics, "higher_is_better": higher_is_better})


def _fields(evaluation: Evaluation) -> dict[str, Any]:
    return {item.name: getattr(evaluation, item.name) for item in fields(Evaluation)}
