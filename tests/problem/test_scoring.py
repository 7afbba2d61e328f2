"""From predictions to one score, where higher is always better and what is not a number never wins."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.algorithms.validation import Validator
from forkmerge.engine.training.state import State
from forkmerge.problem.metrics import Criterion
from forkmerge.problem.scoring import evaluating
from problems import (
    SGD,
    Augmented,
    Counted,
    examples,
    fit,
    minus_loss,
    noisy_net,
    plain_net,
    predict_target,
    seeded,
    shared_problem,
)


def evaluate(metrics: Any, dataset: Any = None, **options: Any) -> fm.Evaluation:
    data = TensorDataset(*examples(24, 2)) if dataset is None else dataset
    return fm.Evaluation(data, metrics, predict_target, **options)


def error_rate(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return 1 - fm.accuracy(predictions, targets)


class TestMeasure:
    def test_a_plain_callable_gets_all_predictions_at_once(self) -> None:
        net = seeded(plain_net)
        inputs, labels = examples(24, 2)
        for batch_size in (1, 5, 24, 100):
            values = fm.measure(net, evaluate({"accuracy": fm.accuracy}, batch_size=batch_size))
            assert values == {"accuracy": fm.accuracy(net(inputs), labels[:, 0])}

    def test_a_torchmetrics_object_is_fed_batch_by_batch_and_left_empty(self) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        metric = MulticlassAccuracy(num_classes=3, average="micro")
        evaluation = evaluate({"torchmetrics": metric, "plain": fm.accuracy}, batch_size=5)
        for _ in range(2):  # nothing is left over for the second time
            values = fm.measure(seeded(plain_net), evaluation)
            assert values["torchmetrics"] == pytest.approx(values["plain"])
        assert metric.update_count == 0

    def test_a_single_metric_is_named_after_itself(self) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        assert list(evaluate(fm.accuracy).metrics) == ["accuracy"]
        assert list(evaluate(MulticlassAccuracy(3)).metrics) == ["MulticlassAccuracy"]

    def test_the_model_is_evaluated_in_evaluation_mode_and_every_module_gets_its_mode_back(self) -> None:
        net = seeded(noisy_net)
        net.train()
        net.body[1].eval()
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        modes = []

        def predict(model: nn.Module, batch: Any) -> Any:
            modes.append((model.training, model.body[3].training, torch.is_grad_enabled()))
            return predict_target(model, batch)

        fm.measure(net, fm.Evaluation(TensorDataset(*examples(10, 2)), fm.accuracy, predict))
        assert modes == [(False, False, False)]
        assert (net.training, net.body[1].training, net.body[3].training) == (True, False, True)
        assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())

    def test_modes_come_back_after_an_error(self) -> None:
        net = seeded(noisy_net)
        with pytest.raises(ZeroDivisionError), evaluating(net):
            _ = 1 / 0
        assert net.body[3].training

    def test_the_same_model_gets_the_same_numbers_also_from_a_data_set_that_draws(self) -> None:
        evaluation = evaluate(minus_loss, Augmented())
        net = seeded(plain_net)
        first = fm.measure(net, evaluation, seed=1)
        torch.rand(5)
        assert fm.measure(net, evaluation, seed=1) == first
        assert fm.measure(net, evaluation, seed=2) != first

    def test_only_the_given_examples_are_read(self) -> None:
        data = Counted(24, 2)
        values = fm.measure(seeded(plain_net), evaluate(minus_loss, data), indices=[3, 7, 11])
        assert data.reads == 3
        inputs, labels = examples(24, 2)
        picked = TensorDataset(inputs[[3, 7, 11]], labels[[3, 7, 11]])
        assert values == fm.measure(seeded(plain_net), evaluate(minus_loss, picked))

    def test_predictions_may_be_containers(self) -> None:
        def predict(model: nn.Module, batch: Any) -> Any:
            logits, targets = predict_target(model, batch)
            return {"logits": logits, "both": (logits, logits.mean())}, [int(t) for t in targets]

        def check(predictions: Any, targets: Any) -> float:
            assert predictions["logits"].shape == predictions["both"][0].shape == (24, 3)
            assert predictions["both"][1].shape == (5,)
            assert len(targets) == 24
            return 1.0

        evaluation = fm.Evaluation(TensorDataset(*examples(24, 2)), check, predict, batch_size=5)
        assert fm.measure(seeded(plain_net), evaluation) == {"check": 1.0}

    def test_a_metric_that_gives_no_number_is_named(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"'per_class' must give one number, got a tensor of shape \(2,\)"):
            fm.measure(seeded(plain_net), evaluate({"per_class": lambda p, t: torch.zeros(2)}))

    def test_a_metric_that_is_neither_callable_nor_torchmetrics_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="metric 'm' must be a torchmetrics object or a callable, got 3"):
            evaluate({"m": 3})

    def test_an_evaluation_without_metrics_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="at least one metric"):
            evaluate({})


class TestDirections:
    def test_torchmetrics_say_themselves_which_way_is_better(self) -> None:
        from torchmetrics import MeanSquaredError
        from torchmetrics.classification import MulticlassAccuracy

        assert evaluate({"a": MulticlassAccuracy(3), "e": MeanSquaredError()}).directions == {"a": 1, "e": -1}

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
        assert evaluate({"mean": MeanMetric(), "a": MulticlassAccuracy(3)}, higher_is_better=said).directions == {
            "mean": -1,
            "a": -1,
        }

    def test_plain_callables_count_as_higher_is_better_unless_said_otherwise(self) -> None:
        assert evaluate(error_rate).directions == {"error_rate": 1}
        assert evaluate(error_rate, higher_is_better={"error_rate": False}).directions == {"error_rate": -1}

    def test_a_direction_for_an_unknown_metric_offers_the_closest(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"unknown metric 'eror_rate'\. Did you mean 'error_rate'"):
            evaluate(error_rate, higher_is_better={"eror_rate": False})

    def test_a_run_on_an_error_makes_the_choices_of_a_run_on_the_score(self) -> None:
        def loss(predictions: Any, targets: Any) -> float:
            return -minus_loss(predictions, targets)

        algorithm = fm.ForkMerge("per_auxiliary", interval=4)
        down = shared_problem(validation=evaluate({"loss": loss}, higher_is_better={"loss": False}))
        up = fit(algorithm)
        turned = fit(algorithm, down)
        assert turned.coefficients == up.coefficients
        assert turned.score == up.score
        assert turned.metrics == {"loss": -up.metrics["minus_loss"]}


NYUV2 = {"mIoU": 1, "pixAcc": 1, "absErr": -1, "relErr": -1}


class TestCriterion:
    def test_one_metric_is_its_own_score_turned_where_lower_is_better(self) -> None:
        assert Criterion({"acc": 1}).score({"acc": 0.25}) == 0.25
        assert Criterion({"err": -1}).score({"err": 0.25}) == -0.25

    def test_several_metrics_are_the_mean_of_their_signed_relative_changes(self) -> None:
        # +10 %, +5 %, an error that fell by 20 %, one that rose by 10 %: (.1 + .05 + .2 − .1) / 4.
        reference = {"mIoU": 50.0, "pixAcc": 80.0, "absErr": 0.5, "relErr": 0.2}
        values = {"mIoU": 55.0, "pixAcc": 84.0, "absErr": 0.4, "relErr": 0.22}
        assert Criterion(NYUV2).with_reference(reference).score(values) == pytest.approx(0.0625)

    def test_a_negative_reference_keeps_better_positive(self) -> None:
        criterion = Criterion({"a": 1, "b": 1}).with_reference({"a": -2.0, "b": 1.0})
        assert criterion.score({"a": -1.0, "b": 1.0}) == pytest.approx(0.25)

    @given(st.lists(st.floats(0.1, 10), min_size=4, max_size=4), st.floats(0.01, 5))
    def test_the_reference_itself_scores_zero_and_the_unit_of_a_metric_does_not_matter(
        self, numbers: list[float], unit: float
    ) -> None:
        reference = dict(zip(NYUV2, numbers, strict=True))
        values = {name: 1.3 * value for name, value in reference.items()}
        criterion = Criterion(NYUV2).with_reference(reference)
        assert criterion.score(reference) == 0
        rescaled = Criterion(NYUV2).with_reference({n: v * unit for n, v in reference.items()})
        assert rescaled.score({n: v * unit for n, v in values.items()}) == pytest.approx(criterion.score(values))

    @pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
    def test_a_reference_that_cannot_be_compared_with_names_its_metric(self, bad: float) -> None:
        with pytest.raises(fm.ProblemError, match=rf"reference value of metric 'b' is {bad}.*reference=\{{'b': …\}}"):
            Criterion({"a": 1, "b": 1}).with_reference({"a": 1.0, "b": bad})

    def test_a_missing_reference_offers_the_closest(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"unknown metric 'accuracy'\. Did you mean 'acuracy'"):
            Criterion({"accuracy": 1, "b": 1}).with_reference({"acuracy": 1.0, "b": 1.0})

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_anything_that_is_not_a_number_scores_minus_infinity(self, bad: float) -> None:
        assert Criterion({"a": 1}).score({"a": bad}) == -math.inf
        assert Criterion({"a": -1}).score({"a": bad}) == -math.inf
        several = Criterion({"a": 1, "b": -1}).with_reference({"a": 1.0, "b": 1.0})
        assert several.score({"a": 2.0, "b": bad}) == -math.inf

    def test_several_metrics_cannot_be_scored_without_a_reference(self) -> None:
        with pytest.raises(fm.ProblemError, match="need reference values"):
            Criterion({"a": 1, "b": 1}).score({"a": 1.0, "b": 1.0})


TWO = {"minus_loss": minus_loss, "accuracy": fm.accuracy}


class TestSeveralMetricsInARun:
    def test_the_target_only_branch_of_round_one_is_the_reference_of_all_rounds(self) -> None:
        run = fit(fm.ForkMerge("per_auxiliary", interval=4), shared_problem(metrics=TWO))
        first = run.rounds[0].branches["alone"]
        assert first.score == 0.0
        criterion = Criterion({"minus_loss": 1, "accuracy": 1}).with_reference(first.metrics)
        for finished in run.rounds:
            for branch in finished.branches.values():
                assert branch.score == pytest.approx(criterion.score(branch.metrics))
        assert run.score == pytest.approx(criterion.score(run.metrics))

    def test_a_reference_of_the_user_is_used_instead(self) -> None:
        reference = {"minus_loss": -1.0, "accuracy": 0.5}
        run = fit(fm.ForkMerge(interval=4, reference=reference), shared_problem(metrics=TWO))
        first = run.rounds[0].branches["alone"]
        expected = ((first.metrics["minus_loss"] + 1) + (first.metrics["accuracy"] - 0.5) / 0.5) / 2
        assert first.score == pytest.approx(expected)

    def test_a_zero_reference_of_the_target_only_branch_names_the_metric(self) -> None:
        problem = shared_problem(metrics={"minus_loss": minus_loss, "zero": lambda p, t: 0.0})
        with pytest.raises(fm.ProblemError, match=r"reference value of metric 'zero' is 0\.0"):
            fit(problem=problem)

    @pytest.mark.parametrize(
        "algorithm", [fm.Joint(), fm.SingleTask(), fm.Joint(refit=True), fm.Joint(select="best", refit=True)]
    )
    def test_a_run_of_one_branch_is_its_own_reference(self, algorithm: fm.Algorithm) -> None:
        run = fit(algorithm, shared_problem(metrics=TWO))
        if run.searched:
            assert run.rounds[0].score == 0.0

    def test_branches_without_a_target_only_one_need_a_reference_before_training(self) -> None:
        branches = {"a": {"tgt": 1.0, "aux": 1.0}, "b": {"tgt": 1.0, "odd": 1.0}}
        problem = shared_problem(metrics=TWO)
        with pytest.raises(fm.ProblemError, match=r"2 metrics and no branch trains on it alone: pass reference="):
            fit(fm.ForkMerge(branches), problem)
        reference = {"minus_loss": -1.0, "accuracy": 0.5}
        assert fit(fm.ForkMerge(branches, reference=reference), problem).score is not None

    def test_ranking_runs_need_a_reference_before_training(self) -> None:
        algorithm = fm.ForkMerge(fm.NestedTopK(probe_steps=2), interval=4)
        with pytest.raises(fm.ProblemError, match=r"ranking runs are scored before round 1.*pass reference="):
            fit(algorithm, shared_problem(metrics=TWO))


class TestBadScores:
    def test_a_metric_that_returns_nan_never_wins(self) -> None:
        """Every mixture of branches scores NaN: only single branches can be installed."""
        singles: list[torch.Tensor] = []

        def fragile(model: nn.Module, batch: Any) -> Any:
            weight = model.heads["tgt"].weight.detach().clone()
            if len(singles) <= 3:  # one call before training, then the branches on their own
                singles.append(weight)
            known = any(torch.equal(weight, single) for single in singles)
            logits, targets = predict_target(model, batch)
            return logits if known else logits * torch.nan, targets

        validation = fm.Evaluation(TensorDataset(*examples(24, 2)), minus_loss, fragile)
        run = fit(fm.ForkMerge("per_auxiliary", interval=4), shared_problem(validation=validation), steps=4)
        (only,) = run.rounds
        assert sorted(only.coefficients.values()) == [0.0, 0.0, 1.0]
        mixed = [c for c in only.candidates if max(c.coefficients.values()) < 1]
        assert mixed
        assert all(candidate.score is None for candidate in mixed)
        assert math.isfinite(run.score)

    def test_a_branch_whose_metric_is_nan_gets_coefficient_zero_and_is_named(self) -> None:
        calls: list[int] = []

        def sometimes(predictions: Any, targets: Any) -> float:
            calls.append(1)
            return math.nan if len(calls) == 3 else minus_loss(predictions, targets)  # checks, alone, joint

        run = fit(problem=shared_problem(metrics={"m": sometimes}), steps=4)
        (only,) = run.rounds
        assert only.coefficients == {"alone": 1.0, "joint": 0.0}
        assert only.branches["joint"].fault == "its validation score is not finite"
        assert "round 1: branch 'joint' got coefficient 0: its validation score is not finite" in run.notes


def test_what_was_measured_of_a_state_is_not_believed_of_another_at_its_address() -> None:
    binding = fm.Training(SGD).binding(seeded(plain_net))
    judge = Validator(binding, shared_problem(), None, None, seed=0)
    first = binding.initial()
    judge.metrics(state := first.clone())
    assert set(judge.known_metrics(state)) == {"minus_loss"}
    address = id(state)
    del state
    other = State(0, {})  # which may get the address of the first, but not whenever a test would like it to
    judge._measured[id(other)] = judge._measured[address]
    assert judge.known_metrics(other) == {}
    assert judge.seconds([other]) == 0.0
