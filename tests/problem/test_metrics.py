"""Metrics that add up over examples: their values, and what they refuse."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.problem.metrics import Criterion
from forkmerge.problem.scoring import CostReader
from problems import Augmented, Counted, examples, plain_net, predict_target, seeded

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 5.0]])


class TestValues:
    def test_accuracy_is_the_share_of_right_guesses(self) -> None:
        assert fm.accuracy(LOGITS, torch.tensor([0, 1, 1])) == 2 / 3
        assert fm.accuracy(LOGITS.expand(4, 3, 3), torch.tensor([0, 1, 1]).expand(4, 3)) == 2 / 3

    def test_one_logit_is_positive_for_class_1(self) -> None:
        logits, targets = torch.tensor([-2.0, 3.0, 0.5, -1.0]), torch.tensor([0, 1, 0, 1])
        for shaped, labels in (
            (logits.unsqueeze(1), targets),
            (logits, targets),
            (logits.unsqueeze(1), targets.unsqueeze(1).float()),
            (logits.view(2, 2, 1), targets.view(2, 2)),
        ):
            assert fm.accuracy(shaped, labels) == 0.5
        both = torch.stack([torch.zeros(4), logits], 1)
        rows = fm.accuracy.rows(logits.unsqueeze(1), targets)
        torch.testing.assert_close(rows, fm.accuracy.rows(both, targets))
        assert fm.nll(logits.unsqueeze(1), targets) == fm.nll(logits, targets) == fm.nll(both, targets)
        assert fm.nll(logits.unsqueeze(1), torch.tensor([0, 1, 0, -100])) == fm.nll(logits[:3], targets[:3])

    def test_a_prediction_of_nan_is_an_error(self) -> None:
        broken = LOGITS.clone()
        broken[0, 0] = math.nan  # `argmax` would take it
        assert fm.accuracy(broken, torch.tensor([0, 1, 2])) == 2 / 3

    def test_nll_is_cross_entropy_and_ignores_what_torch_ignores(self) -> None:
        logits, targets = torch.randn(5, 3, 4), torch.randint(3, (5, 4))
        targets[1] = -100
        assert fm.nll(logits, targets) == pytest.approx(cross_entropy(logits.double(), targets).item(), rel=1e-12)

    def test_absolute_error_is_over_targets_that_are_known(self) -> None:
        targets = torch.tensor([[1.0, math.nan], [0.0, 4.0]])
        assert fm.absolute_error(torch.zeros(2, 2), targets) == 5 / 3
        assert math.isnan(fm.absolute_error(torch.zeros(1), torch.tensor([math.nan])))

    def test_a_cost_of_nan_is_infinite(self) -> None:
        assert fm.absolute_error(torch.tensor([math.nan, 0.0]), torch.zeros(2)) == math.inf
        assert fm.nll(LOGITS * math.nan, torch.tensor([0, 1, 2])) == math.inf

    def test_values_do_not_depend_on_the_order_of_examples(self) -> None:
        spread = torch.tensor([1e16, 1.0, 1.0, 1e-16, 3.0], dtype=torch.float64)
        orders = [torch.randperm(5) for _ in range(20)]
        values = {fm.absolute_error(spread[order], torch.zeros(5)) for order in orders}
        assert values == {math.fsum(spread.tolist()) / 5}

    def test_they_name_themselves_say_which_way_is_better_and_pickle(self) -> None:
        metrics = {"accuracy": 1, "nll": -1, "absolute_error": -1}
        for name, direction in metrics.items():
            metric = pickle.loads(pickle.dumps(getattr(fm, name)))
            assert metric == getattr(fm, name)
            assert fm.Evaluation(TensorDataset(LOGITS), metric).directions == {name: direction}


class TestRefusals:
    def test_costs_may_not_be_negative(self) -> None:
        metric = fm.MeanCost(lambda p, t: p - t, name="signed")
        with pytest.raises(fm.ProblemError, match=r"'signed' has a cost of -2: costs may not be negative"):
            metric(torch.zeros(2), torch.tensor([1.0, 2.0]))

    @pytest.mark.parametrize("cost", [lambda p, t: p, lambda p, t: p.mean(), lambda p, t: 1.0])
    def test_a_cost_is_one_number_per_example(self, cost: Any) -> None:
        with pytest.raises(fm.ProblemError, match="'wide' must cost a tensor of one number per example, got"):
            fm.MeanCost(cost, name="wide")(LOGITS, torch.tensor([0, 1, 2]))

    def test_a_target_that_is_no_class_is_an_error_like_any(self) -> None:
        targets = torch.tensor([0, -1, 3])
        assert fm.accuracy(LOGITS, targets) == 1 / 3
        assert fm.accuracy.rows(LOGITS, targets)[1:, 2].tolist() == [1 + 1, 1 + 1]

    def test_a_target_that_is_missing_does_not_count(self) -> None:
        targets = torch.tensor([0, -100, 1])
        assert fm.accuracy(LOGITS, targets) == fm.accuracy(LOGITS[[0, 2]], targets[[0, 2]]) == 1 / 2
        assert fm.accuracy.rows(LOGITS, targets)[1].tolist() == [0, 0, 0]
        assert fm.accuracy(torch.tensor([-1.0, 1.0, 1.0]), torch.tensor([0, 0, -100])) == 1 / 2
        assert fm.accuracy(LOGITS, torch.tensor([0, 156, 2]).byte()) == 2 / 3, "156 is -100 in a byte, and not missing"
        assert math.isnan(fm.accuracy(LOGITS, torch.full((3,), -100)))

    @pytest.mark.parametrize("metric", [fm.accuracy, fm.nll])
    @pytest.mark.parametrize("odd", [0.5, math.nan])
    def test_targets_between_classes_are_refused(self, metric: fm.MeanCost, odd: float) -> None:
        with pytest.raises(fm.ProblemError, match=r"needs targets that are classes, as integers, got (0\.5|nan) among"):
            metric(LOGITS, torch.tensor([0.0, odd, 2.0]))
        assert metric(LOGITS, torch.tensor([0.0, 1.0, 2.0])) == metric(LOGITS, torch.tensor([0, 1, 2]))

    def test_shapes_that_would_be_broadcast_are_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="absolute_error needs targets of the shape of predictions"):
            fm.absolute_error(LOGITS, torch.zeros(3, 1, dtype=torch.long))
        with pytest.raises(fm.ProblemError, match=r"got predictions float32\[3, 3\] and targets int64\[3, 1\]"):
            fm.accuracy(LOGITS, torch.zeros(3, 1, dtype=torch.long))

    def test_shapes_that_accuracy_cannot_mean_are_refused_by_name(self) -> None:
        classes = torch.tensor([0, 1, 1])
        for predictions, targets in ((LOGITS, LOGITS), (classes, classes), (LOGITS, [0, 1, 1]), (LOGITS[:2], classes)):
            with pytest.raises(fm.ProblemError, match=r"accuracy needs logits \[n, classes\] and classes \[n\]"):
                fm.accuracy(predictions, targets)
        with pytest.raises(fm.ProblemError, match=r"targets that are 0 or 1, got \[0, 2\]"):
            fm.accuracy(torch.zeros(2, 1), torch.tensor([0, 2]))


class TestMeasure:
    def test_every_forward_pass_has_one_shape_and_copies_do_not_count(self) -> None:
        shapes: list[int] = []

        def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            shapes.append(len(batch[0]))
            return predict_target(model, batch)

        net, (inputs, labels) = seeded(plain_net), examples(23, 2)
        scored = fm.Evaluation(TensorDataset(inputs, labels), {"a": fm.accuracy, "n": fm.nll}, predict, batch_size=10)
        values = fm.measure(net, scored)
        assert shapes == [10, 10, 10]
        logits = net(inputs)
        assert values == {"a": fm.accuracy(logits, labels[:, 0]), "n": pytest.approx(fm.nll(logits, labels[:, 0]))}
        shapes.clear()
        part = fm.measure(net, scored, indices=[3, 4, 5])
        assert shapes == [10]
        assert part["a"] == fm.accuracy(logits[3:6], labels[3:6, 0])

    def test_examples_are_read_once_and_drawn_alike_wherever_they_stand(self) -> None:
        counted = Counted(23, 2)
        fm.measure(seeded(plain_net), fm.Evaluation(counted, fm.nll, predict_target, batch_size=10))
        assert counted.reads == 23
        reader = CostReader(fm.Evaluation(Augmented(12, 2), fm.nll, predict_target, batch_size=4), 0)
        order = [7, 3, 11, 0, 5, 8, 1, 2, 10, 4, 6, 9]
        moved, plain = reader.read(seeded(plain_net), order), reader.read(seeded(plain_net), range(12))
        torch.testing.assert_close(moved.costs, plain.costs[order])

    def test_predictions_may_be_containers_if_the_cost_knows_them(self) -> None:
        def predict(model: nn.Module, batch: Any) -> Any:
            logits, targets = predict_target(model, batch)
            return {"logits": logits}, (targets,)

        metric = fm.MeanCost(lambda p, t: cross_entropy(p["logits"], t[0], reduction="none"), name="loss")
        data = TensorDataset(*examples(23, 2))
        values = fm.measure(seeded(plain_net), fm.Evaluation(data, metric, predict, batch_size=10))
        metrics = fm.measure(seeded(plain_net), fm.Evaluation(data, fm.nll, predict_target, batch_size=10))
        assert values["loss"] == pytest.approx(metrics["nll"], rel=1e-5)


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


def test_slopes_of_a_score_are_its_differences() -> None:
    metrics = {"hits": fm.accuracy, "extra": fm.absolute_error, "loss": fm.nll}
    criteria = [
        Criterion({"loss": -1}),
        Criterion({"hits": 1}),
        Criterion({"hits": -1}),
        Criterion({"hits": 1, "loss": -1}, {"hits": 0.5, "loss": -2.0}),
    ]
    for criterion in criteria:
        base = criterion.score_of_sums(metrics, [3.0, 1.0, 2.0], [10.0, 10.0, 10.0])
        raised = [[3.0 + (at == 0), 1.0, 2.0 + (at == 2)] for at in (0, 2)]
        names = [name for name in ("hits", "loss") if name in criterion.directions]
        changes = dict(zip(("hits", "loss"), raised, strict=True))
        expected = [10 * (criterion.score_of_sums(metrics, changes[name], [10.0] * 3) - base) for name in names]
        assert criterion.slopes(metrics) == pytest.approx(expected)
    with pytest.raises(fm.ProblemError, match="reference values"):
        Criterion({"hits": 1, "loss": -1}).slopes(metrics)
