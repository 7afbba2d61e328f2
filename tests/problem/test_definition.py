"""A problem: what it is made of, and what is refused when it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import forkmerge as fm
from problems import DATA, evaluation, fit, problem_with, shared_losses, shared_problem


class TestProblems:
    def test_an_unknown_target_offers_the_closest(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"unknown task 'tgd'\. Did you mean 'tgt'\? Known: tgt, aux, odd\."):
            fm.Problem("tgd", problem_with().streams, evaluation())
        with pytest.raises(fm.ProblemError, match=r"target: unknown task 'odds'\. Did you mean 'odd'"):
            problem_with().with_target("odds")

    def test_no_validation_data_says_what_to_pass(self) -> None:
        streams = problem_with().streams
        for validation in (None, {}, {"aux": evaluation()}):
            with pytest.raises(fm.ProblemError, match=r"'tgt' has no validation data: pass validation=\{'tgt': Eval"):
                fm.Problem("tgt", streams, validation)
        with pytest.raises(fm.ProblemError, match="the target 'odd' has no validation data"):
            problem_with().with_target("odd")

    def test_empty_data_sets_are_named(self) -> None:
        nothing = TensorDataset(torch.zeros(0, 6), torch.zeros(0, 3))
        with pytest.raises(fm.ProblemError, match="the data set of stream 'all' is empty"):
            problem_with(dataset=nothing)
        with pytest.raises(fm.ProblemError, match="the validation data of the target 'tgt' is empty"):
            fm.Problem("tgt", problem_with().streams, fm.Evaluation(nothing, fm.accuracy))

    def test_a_task_name_that_would_leave_its_folder_is_refused(self) -> None:
        for name in ("../tgt", "a/b", "..", ".", "a\\b", "C:x", "a\0b", "", " tgt", "tab\t", None):
            stream = fm.Stream(DATA, shared_losses, [name], 8)
            with pytest.raises(fm.ProblemError, match="task name"):
                fm.Problem("tgt", {"s": stream, "t": problem_with().stream_map["all"]}, evaluation())

    def test_a_very_long_task_name_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"task name 'é+'… is longer than 100 bytes"):
            fm.Problem("tgt", [fm.Stream(DATA, shared_losses, ["tgt", "é" * 60], 8)], evaluation())

    def test_an_iterable_data_set_gets_a_clear_answer(self) -> None:
        class Endless(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(range(9))

        with pytest.raises(fm.ProblemError, match=r"stream of tgt has an iterable data set.*Pass a map-style data set"):
            fm.Stream(Endless(), shared_losses, "tgt", 8)

    def test_a_data_set_without_a_length_is_refused(self) -> None:
        class Unmeasured(Dataset[Any]):
            def __getitem__(self, index: int) -> int:
                return index

        with pytest.raises(fm.ProblemError, match="a data set of type Unmeasured has no length: add __len__"):
            problem_with(dataset=Unmeasured())

    @pytest.mark.parametrize("size", [0, -1, 2.5, "8", True])
    def test_a_batch_size_must_be_a_positive_integer(self, size: Any) -> None:
        with pytest.raises(fm.ProblemError, match="batch size of the stream of tgt must be a positive integer, got"):
            fm.Stream(DATA, shared_losses, "tgt", size)

    @pytest.mark.parametrize("size", [0, -1, 2.5, None, True])
    def test_so_must_that_of_an_evaluation(self, size: Any) -> None:
        with pytest.raises(fm.ProblemError, match="the batch size of an evaluation must be a positive integer, got"):
            fm.Evaluation(DATA, fm.accuracy, batch_size=size)

    def test_a_stream_must_serve_a_task(self) -> None:
        with pytest.raises(fm.ProblemError, match="a stream must serve at least one task"):
            fm.Stream(DATA, shared_losses, [], 8)

    def test_two_streams_for_the_same_tasks_need_names(self) -> None:
        stream = fm.Stream(DATA, shared_losses, "tgt", 8)
        with pytest.raises(fm.ProblemError, match=r"serve the same tasks: pass streams as \{name: stream\}"):
            fm.Problem("tgt", [stream, stream], evaluation())

    def test_weights_have_two_meanings_only(self) -> None:
        with pytest.raises(fm.ProblemError, match="weights must be 'loss' or 'sampling', got 'losses'"):
            shared_problem(weights="losses")

    def test_a_data_set_in_place_of_an_evaluation(self) -> None:
        good = shared_problem()
        with pytest.raises(fm.ProblemError, match=r"validation must be an Evaluation .* got TensorDataset: wrap"):
            fm.Problem("tgt", good.streams, TensorDataset(torch.zeros(2, 1)))

    def test_one_stream_needs_no_list(self) -> None:
        stream = next(iter(shared_problem().stream_map.values()))
        assert fm.Problem("tgt", stream, shared_problem().validation).tasks == shared_problem().tasks

    def test_losses_with_too_few_arguments(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"must take \(model, batch, tasks, context\)"):
            fm.Stream(TensorDataset(torch.zeros(2, 1)), lambda model, batch: {}, ["tgt"], 1)


def rows(dataset: object) -> list[float]:
    return [float(dataset[index][0].sum()) for index in range(len(dataset))]  # type: ignore[arg-type,index]


def with_test() -> fm.Problem:
    problem = shared_problem()
    return fm.Problem(problem.target, problem.streams, problem.validation, test=problem.target_validation)


def test_a_third_of_the_training_data_takes_the_place_of_the_test_data() -> None:
    problem = with_test()
    made = problem.for_development()
    (stream,) = problem.stream_map.values()
    (kept,) = made.stream_map.values()
    held = made.evaluations("test")[made.target].dataset
    assert len(held) == len(stream.dataset) // 3  # type: ignore[arg-type]
    assert sorted(rows(kept.dataset) + rows(held)) == sorted(rows(stream.dataset))
    assert rows(made.target_validation.dataset) == rows(problem.target_validation.dataset)


def test_test_data_of_another_form_is_refused_by_name() -> None:
    problem = shared_problem()
    held = problem.target_validation
    odd = fm.Evaluation(held.dataset, held.metrics, held.predict, as_training=held.dataset)
    with pytest.raises(fm.ProblemError, match="another form"):
        fm.Problem(problem.target, problem.streams, problem.validation, test=odd).for_development()


def error_rate(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return 1 - fm.accuracy(predictions, targets)


class TestDirections:
    def test_torchmetrics_say_themselves_which_way_is_better(self) -> None:
        from torchmetrics import MeanSquaredError
        from torchmetrics.classification import MulticlassAccuracy

        assert evaluation(metrics={"a": MulticlassAccuracy(3), "e": MeanSquaredError()}).directions == {"a": 1, "e": -1}

    def test_a_metric_that_does_not_say_is_refused_before_training_with_what_to_pass(self) -> None:
        from torchmetrics import MeanMetric, SumMetric

        assert MeanMetric.higher_is_better is None
        problem = shared_problem(metrics={"mean": SumMetric()})
        with pytest.raises(fm.ProblemError, match=r"metric 'mean' does not say .*higher_is_better=\{'mean': True\}"):
            fit(problem=problem)

    def test_the_user_has_the_last_word(self) -> None:
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassAccuracy

        said = {"mean": False, "a": False}
        assert evaluation(
            metrics={"mean": MeanMetric(), "a": MulticlassAccuracy(3)}, higher_is_better=said
        ).directions == {
            "mean": -1,
            "a": -1,
        }

    def test_plain_callables_count_as_higher_is_better_unless_said_otherwise(self) -> None:
        assert evaluation(metrics=error_rate).directions == {"error_rate": 1}
        assert evaluation(metrics=error_rate, higher_is_better={"error_rate": False}).directions == {"error_rate": -1}

    def test_a_direction_for_an_unknown_metric_offers_the_closest(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"unknown metric 'eror_rate'\. Did you mean 'error_rate'"):
            evaluation(metrics=error_rate, higher_is_better={"eror_rate": False})

    def test_a_metric_that_is_neither_callable_nor_torchmetrics_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="metric 'm' must be a torchmetrics object or a callable, got 3"):
            evaluation(metrics={"m": 3})

    def test_an_evaluation_without_metrics_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="at least one metric"):
            evaluation(metrics={})


def test_a_loader_in_the_place_of_as_training_is_refused() -> None:
    dataset = TensorDataset(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(fm.ProblemError, match="as_training of an evaluation needs a data set and got a DataLoader"):
        fm.Evaluation(dataset, fm.accuracy, as_training=DataLoader(dataset))


def test_what_is_no_stream_no_data_set_and_no_direction_is_refused() -> None:
    dataset = TensorDataset(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(fm.ProblemError, match=r"streams must be .* got TensorDataset: wrap the data set"):
        fm.Problem("tgt", {"all": dataset}, evaluation())  # type: ignore[dict-item]
    with pytest.raises(fm.ProblemError, match="needs a data set and got 2 tensors: wrap them in a TensorDataset"):
        fm.Stream(dataset.tensors, shared_losses, ("tgt",), 4)  # type: ignore[arg-type]
    with pytest.raises(fm.ProblemError, match=r"an evaluation needs a map-style data set .* got NoneType"):
        fm.Evaluation(None, fm.accuracy)  # type: ignore[arg-type]
    with pytest.raises(fm.ProblemError, match="higher_is_better of metric 'm' must be True or False, got 'no'"):
        fm.Evaluation(dataset, {"m": fm.accuracy}, higher_is_better={"m": "no"})  # type: ignore[dict-item]
