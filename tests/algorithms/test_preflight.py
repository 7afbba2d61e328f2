"""What cannot work is refused with one clear message, before a single training step and without leaving a folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

import forkmerge as fm
from _asserts import assert_same_bits
from forkmerge.problem.example_order import batch_indices
from problems import (
    SGD,
    TASKS,
    Refuse,
    domains_problem,
    evaluation,
    examples,
    fit,
    minus_loss,
    noisy_net,
    plain_net,
    predict_target,
    problem_with,
    seeded,
    shared_losses,
    shared_problem,
)


class TestSearches:
    def test_a_search_that_does_not_fit_the_number_of_branches(self, refused: Refuse) -> None:
        refused("binary search merges two branches, got 3", fm.ForkMerge("per_auxiliary", search="binary"))
        refused("expected 3 coefficients", fm.ForkMerge("per_auxiliary", search=fm.Fixed((0.5, 0.5))))

    def test_fixed_coefficients_that_pruning_would_not_leave_alone(self, refused: Refuse) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", search=fm.Fixed((0.5, 0.25, 0.25)), prune_to=2)
        refused("prune_to=2 may leave fewer branches than the search can merge: expected 2 coefficients", algorithm)


class TestLosses:
    def test_a_loss_that_does_not_depend_on_the_model(self, refused: Refuse) -> None:
        def detached(*arguments: Any) -> Any:
            return {task: loss.detach() for task, loss in shared_losses(*arguments).items()}

        refused(r"loss of task 'tgt' does not depend on the model.*Look for \.detach\(\)", None, problem_with(detached))

    def test_also_if_only_one_branch_of_many_asks_for_it(self, refused: Refuse) -> None:
        def partly(*arguments: Any) -> Any:
            return {t: loss.detach() if t == "odd" else loss for t, loss in shared_losses(*arguments).items()}

        refused(
            "the loss of task 'odd' does not depend on the model", fm.ForkMerge("per_auxiliary"), problem_with(partly)
        )

    def test_a_loss_that_is_not_finite_before_training(self, refused: Refuse) -> None:
        def nan(*arguments: Any) -> Any:
            return {task: loss * torch.nan for task, loss in shared_losses(*arguments).items()}

        refused("the loss of task 'tgt' is nan on the first batch, before any training", None, problem_with(nan))

    def test_the_example_of_the_first_batch_that_holds_no_number_is_named(self, refused: Refuse) -> None:
        inputs, labels = examples(16, 1)
        index = int(batch_indices(16, 8, 0, 0, "all")[3])
        inputs[index, 2] = torch.nan
        stream = fm.Stream(TensorDataset(inputs, labels), shared_losses, TASKS, 8)
        message = f"is nan on the first batch, before any training. Example {index} of stream 'all' holds a number"
        refused(message, None, fm.Problem("tgt", {"all": stream}, evaluation()))

    def test_a_loss_per_example(self, refused: Refuse) -> None:
        def per_example(*arguments: Any) -> Any:
            return {task: loss.expand(8) for task, loss in shared_losses(*arguments).items()}

        refused(r"must be a scalar, got \(8,\): take its mean", None, problem_with(per_example))

    def test_a_loss_that_is_a_plain_number(self, refused: Refuse) -> None:
        refused(
            "must be a scalar tensor, got float", None, problem_with(lambda m, b, tasks, c: dict.fromkeys(tasks, 1.0))
        )

    def test_losses_that_are_no_mapping(self, refused: Refuse) -> None:
        def total(*arguments: Any) -> Any:
            return sum(shared_losses(*arguments).values())

        refused(r"losses of stream 'all' must return \{task: loss\}, got Tensor", None, problem_with(total))

    def test_a_loss_nobody_asked_for(self, refused: Refuse) -> None:
        def everything(model: Any, batch: Any, tasks: Any, context: Any) -> Any:
            return shared_losses(model, batch, TASKS, context)

        refused(
            "losses of stream 'all' were not asked for this: unknown task 'aux'",
            fm.SingleTask(),
            problem_with(everything),
        )

    def test_batch_size_one_with_batchnorm(self, refused: Refuse) -> None:
        problem = problem_with(batch_size=1)
        refused("stream 'all' has batches of 1 and the model a BatchNorm layer.*at least 2", None, problem, noisy_net)

    def test_labels_out_of_range(self, refused: Refuse) -> None:
        inputs, labels = examples(16, 1)
        dataset = TensorDataset(inputs, labels + 7)
        refused("a label in the first batch of stream 'all' is [789], for which", None, shared_problem(dataset))

    @pytest.mark.parametrize("label", [7, -3])
    @pytest.mark.parametrize("form", ["tensors", "subset", "joined", "stacked"])
    def test_a_label_out_of_range_anywhere_in_tensors(self, refused: Refuse, label: int, form: str) -> None:
        inputs, labels = examples(400, 1)
        labels[5, 0] = -100  # a missing one is fine
        labels[397, 0] = label
        dataset: Any = TensorDataset(inputs, labels)
        if form == "subset":
            dataset = Subset(TensorDataset(inputs.flip(0), labels.flip(0)), list(range(399, -1, -1)))
        elif form == "joined":
            halves = (TensorDataset(inputs[part], labels[part]) for part in (slice(None, 90), slice(90, None)))
            dataset = ConcatDataset(list(halves))
        elif form == "stacked":
            dataset = StackDataset(inputs, labels)
        refused(f"the label of example 397 of stream 'all' is {label}, for which", None, shared_problem(dataset))

    def test_labels_that_are_missing_or_the_last_class_are_no_error(self) -> None:
        inputs, labels = examples(40, 1)
        labels[3], labels[4] = -100, 2
        fit(fm.ForkMerge("mixed", interval=4), shared_problem(TensorDataset(inputs, labels)))

    def test_a_label_out_of_range_anywhere_in_validation_tensors(self, refused: Refuse) -> None:
        inputs, labels = examples(40, 2)
        labels[33, 0] = 9
        validation = fm.Evaluation(TensorDataset(inputs, labels), fm.accuracy, predict_target)
        problem = shared_problem(validation=validation)
        refused("example 33 of the validation data of 'tgt' has the label 9, for which the model has no", None, problem)

    @pytest.mark.parametrize("metric", [fm.accuracy, fm.nll, lambda p, t: (p.argmax(-1) == t).float().mean()])
    def test_a_validation_example_that_no_model_can_predict(self, refused: Refuse, metric: Any) -> None:
        inputs, labels = examples(40, 2)
        inputs[33, 1] = torch.nan
        validation = fm.Evaluation(TensorDataset(inputs, labels), {"m": metric}, predict_target)
        told = "example 33 of the validation data of 'tgt' holds a number that is not finite and is predicted as NaN"
        refused(told, None, shared_problem(validation=validation))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
    def test_labels_of_the_wrong_type(self, refused: Refuse, dtype: torch.dtype) -> None:
        inputs, labels = examples(16, 1)
        dataset = TensorDataset(inputs, labels.to(dtype))
        refused("labels of stream 'all' have type .* classes as integers", None, shared_problem(dataset))

    @pytest.mark.parametrize("column", ["input", "label"])
    def test_text_where_numbers_are_wanted(self, refused: Refuse, column: str) -> None:
        inputs, labels = examples(16, 1)
        pairs = [("a sentence", y) if column == "input" else (x, "cat") for x, y in zip(inputs, labels, strict=True)]
        told = r"stream 'all' gives text where numbers are wanted \(the batch is .*str.*turn it into numbers"
        refused(told, None, problem_with(dataset=pairs))
        validation = fm.Evaluation(pairs, {"m": lambda p, t: (p.argmax(-1) == t.flatten()).float().mean()})
        told = r"the validation data of 'tgt' gives text where numbers are wanted \(.*str"
        refused(told, None, shared_problem(validation=validation))

    def test_another_error_of_the_loss_is_the_users_own(self, refused: Refuse) -> None:
        def broken(*arguments: Any) -> Any:
            raise KeyError("labels")

        refused("labels", None, problem_with(broken), error=KeyError)


class TestMetrics:
    def test_a_metric_that_fails_fails_before_training(self, refused: Refuse) -> None:
        def broken(predictions: Any, targets: Any) -> float:
            raise ZeroDivisionError("no positives")

        refused("no positives", None, shared_problem(metrics={"m": broken}), error=ZeroDivisionError)

    def test_a_metric_that_is_not_a_number_before_training(self, refused: Refuse) -> None:
        problem = shared_problem(metrics={"m": lambda p, t: float("nan")})
        refused(
            "metric 'm' of the target 'tgt' is NaN before any training.*as auc does, for examples of only one",
            None,
            problem,
        )

    def test_a_metric_that_gives_no_number(self, refused: Refuse) -> None:
        problem = shared_problem(metrics={"m": lambda p, t: p})
        refused("metric 'm' must give one number", None, problem)

    def test_a_reference_of_zero_or_for_other_metrics(self, refused: Refuse) -> None:
        problem = shared_problem(metrics={"a": minus_loss, "b": fm.accuracy})
        refused("reference value of metric 'b' is 0", fm.ForkMerge("mixed", reference={"a": 1.0, "b": 0}), problem)
        refused("the reference lacks a value: unknown metric 'b'", fm.ForkMerge("mixed", reference={"a": 1.0}), problem)


@pytest.mark.parametrize("algorithm", [fm.Joint(), fm.PostTrain()])
def test_a_data_set_in_the_place_of_a_problem(refused: Refuse, algorithm: Any) -> None:
    refused(
        "fit needs a Problem, got TensorDataset: say what to learn with fm.Problem",
        algorithm,
        TensorDataset(*examples(8, 1)),
    )


def test_validation_examples_the_stream_cannot_read(refused: Refuse) -> None:
    inputs, labels = examples(24, 2)
    validation = fm.Evaluation(TensorDataset(inputs, labels[:, 0]), fm.accuracy)
    problem = shared_problem(validation=validation)
    refused(
        r"refit=True trains on the validation examples too.*as_training=", fm.ForkMerge("mixed", refit=True), problem
    )


def test_a_refused_run_leaves_the_model_as_it_was() -> None:
    net = seeded(noisy_net)
    net.body[3].eval()
    calls = []

    def broken(predictions: Any, targets: Any) -> float:
        calls.append(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(problem=shared_problem(metrics={"m": broken}), net=net)
    assert calls == [1]
    assert_same_bits(net, seeded(noisy_net))
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not net.body[3].training
    assert net.body[1].training


def test_a_method_that_needs_the_target_in_a_branch_without_it() -> None:
    branches = {"alone": {"tgt": 1.0}, "others": dict.fromkeys(domains_problem().auxiliaries, 1.0)}
    with pytest.raises(fm.ProblemError, match="GCS treats the target differently, but branch 'others'"):
        fm.ForkMerge(branches, method="GCS").fit(domains_problem(), model=plain_net, optimizer=SGD, steps=1)


def test_gradients_at_a_representation_that_nobody_declared() -> None:
    with pytest.raises(fm.ProblemError, match=r"gradients='representation' needs a declared one"):
        fm.Joint(method="MGDA").fit(
            shared_problem(), model=plain_net, optimizer=SGD, steps=1, gradients="representation"
        )


def test_a_search_by_that_is_no_metric_is_refused(refused: Refuse) -> None:
    refused("search_by: .*'nl'.*nll", fm.ForkMerge("mixed", search_by="nl"))


def test_a_method_needs_all_tasks_in_a_step_and_no_streams_in_turn(refused: Refuse) -> None:
    algorithm = fm.ForkMerge(fm.PerAuxiliary(joint="sampled"), method="PCGrad")
    refused("PCGrad combines all tasks in every step, but branch 'joint' reads", algorithm, domains_problem())
