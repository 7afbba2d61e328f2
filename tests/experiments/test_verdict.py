"""A run's model beside single-task training: the reference, the interval over examples, what is said."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_same_bits, bits
from forkmerge.algorithms.saved_run import read_run
from forkmerge.experiments.paired_statistics import t_quantile
from forkmerge.experiments.verdict import MetricVerdict, Verdict, give_verdict
from problems import (
    diverging_problem,
    evaluation,
    examples,
    fit,
    minus_loss,
    noisy_net,
    predict_target,
    seeded,
    shared_problem,
)

FLOOR = fm.ForkMerge("per_auxiliary", interval=4, search=fm.Fixed((0.4, 0.3, 0.3)), floor=True)


def with_test(metric: Any, count: int = 240) -> fm.Problem:
    test = fm.Evaluation(TensorDataset(*examples(count, 7)), metric, predict_target)
    return shared_problem(validation=evaluation(metrics=fm.accuracy), test=test)


class TestReference:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_it_is_single_task_training_bit_for_bit(self, workers: int) -> None:
        run = fit(FLOOR, net=noisy_net, workers=workers)
        assert run.final == "floor" or run.reference is not None
        assert_same_bits(run.reference, bits(fit(fm.SingleTask(), net=noisy_net)))

    def test_a_refit_has_one_that_is_refitted_too(self) -> None:
        for search in (fm.Fixed((1.0, 0.0, 0.0)), fm.Fixed((0.4, 0.3, 0.3))):
            algorithm = fm.ForkMerge("per_auxiliary", interval=4, search=search, floor=True, refit=True)
            alone = fit(fm.SingleTask(refit=True), net=noisy_net)
            assert_same_bits(fit(algorithm, net=noisy_net).reference, bits(alone))

    def test_it_is_kept_in_the_folder(self, tmp_path: Path) -> None:
        run = fit(FLOOR, folder=tmp_path / "run")
        again = fit(FLOOR, folder=tmp_path / "run", resume=True)
        assert_same_bits(again.reference, run.reference)
        assert fit(fm.ForkMerge("mixed", interval=4)).reference is None

    def test_steps_are_counted_by_branch(self) -> None:
        assert fit(FLOOR).trained_steps == {"alone": 12, "aux": 12, "odd": 12, "floor": 8}


class TestInterval:
    def changes(self, problem: fm.Problem, run: Any) -> Any:
        other = seeded(noisy_net)
        other.load_state_dict(run.reference)
        return other, problem.test["tgt"]

    def test_a_mean_over_examples_has_the_interval_of_paired_differences(self) -> None:
        problem = with_test(fm.accuracy)
        run = fit(FLOOR, problem, noisy_net)
        run.reference = bits(seeded(noisy_net, 3))
        verdict = give_verdict(run, problem)
        assert verdict is not None
        other, test = self.changes(problem, run)
        right = []
        for model in (run.model, other):
            logits, labels = predict_target(model.eval(), test.dataset[:])
            right.append((logits.argmax(1) == labels).double().tolist())
        differences = [a - b for a, b in zip(*right, strict=True)]
        half = t_quantile(0.975, 239) * stdev(differences) / math.sqrt(240)
        (metric,) = verdict.metrics
        assert (metric.model, metric.single_task) == pytest.approx((fmean(right[0]), fmean(right[1])))
        assert metric.low == pytest.approx(fmean(differences) - half)
        assert metric.high == pytest.approx(fmean(differences) + half)
        assert (verdict.examples, verdict.times) == (240, 44 / 12)

    def test_any_other_metric_has_one_from_groups_of_examples(self) -> None:
        problem = with_test(minus_loss)
        run = fit(FLOOR, problem, noisy_net)
        run.reference = bits(seeded(noisy_net, 3))
        verdict = give_verdict(run, problem)
        assert verdict is not None
        (metric,) = verdict.metrics
        change = metric.model - metric.single_task
        assert metric.low is not None
        assert metric.low < change < metric.high
        assert metric.high - change == pytest.approx(change - metric.low)
        other = fit(FLOOR, with_test(fm.nll), noisy_net)
        other.reference = run.reference
        costs = give_verdict(other, with_test(fm.nll))
        assert costs is not None
        width, exact = metric.high - metric.low, costs.metrics[0].high - costs.metrics[0].low
        assert width == pytest.approx(exact, rel=0.5), "the mean of losses is a mean of costs"

    def test_few_examples_of_such_a_metric_decide_nothing(self) -> None:
        problem = with_test(minus_loss, 12)
        verdict = give_verdict(fit(FLOOR, problem), problem)
        assert verdict is not None
        assert (verdict.metrics[0].low, verdict.decision) == (None, "no difference shown")

    def test_the_model_keeps_its_weights_and_the_verdict_is_kept(self, tmp_path: Path) -> None:
        problem = with_test(fm.accuracy)
        run = fit(FLOOR, problem, noisy_net, folder=tmp_path / "run")
        before = {name: tensor.clone() for name, tensor in bits(run).items()}
        verdict = give_verdict(run, problem, tmp_path / "run")
        assert_same_bits(before, bits(run))
        assert verdict is not None
        assert read_run(tmp_path / "run").verdict == verdict.to_json()
        assert give_verdict(read_run(tmp_path / "run"), problem) == verdict

    def test_without_a_test_split_or_a_reference_there_is_none(self) -> None:
        assert give_verdict(fit(FLOOR), shared_problem()) is None
        problem = with_test(fm.accuracy)
        assert give_verdict(fit(fm.ForkMerge("mixed", interval=4), problem), problem) is None


class TestWords:
    def metric(self, direction: int, low: float | None, high: float | None) -> MetricVerdict:
        return MetricVerdict("error", direction, 0.2, 0.25, low, high)

    @pytest.mark.parametrize(
        ("direction", "low", "high", "decision"),
        [
            (1, 0.01, 0.02, "better"),
            (-1, 0.01, 0.02, "worse"),
            (-1, -0.02, -0.01, "better"),
            (1, -0.02, -0.01, "worse"),
            (1, -0.01, 0.02, "no difference shown"),
            (1, 0.0, 0.0, "no difference shown"),
            (1, None, None, "no difference shown"),
        ],
    )
    def test_a_metric_decides_in_its_own_direction(self, direction: int, low: Any, high: Any, decision: str) -> None:
        assert self.metric(direction, low, high).decision == decision

    def test_metrics_that_disagree_are_both_named(self) -> None:
        better, worse, open_ = self.metric(1, 0.1, 0.2), self.metric(-1, 0.1, 0.2), self.metric(1, -0.1, 0.2)
        assert Verdict([better, open_], 10, 2.0).decision == "better"
        mixed = Verdict([replace(better, name="accuracy"), worse, open_], 10, 2.0)
        assert mixed.decision == "mixed"
        assert mixed.lines[0] == "better in accuracy and worse in error than single-task training"

    def test_models_that_are_one_differ_by_nothing(self) -> None:
        same = MetricVerdict("error", -1, 0.25, 0.25, 0.0, 0.0)
        assert str(same) == "error 0.25 → 0.25 (0 [0, 0])"

    def test_an_error_is_shown_as_an_error(self) -> None:
        verdict = Verdict([self.metric(-1, -0.07, -0.03)], 100, 3.5)
        assert repr(verdict) == str(verdict) == "\n".join(verdict.lines), "a notebook shows what a terminal does"
        assert verdict.lines == [
            "better than single-task training",
            "error 0.25 → 0.2 (−0.05 [−0.07, −0.03]); 95 % over 100 test examples",
            "one seed, at 3.5 times the steps of single-task training, the reference's included",
        ]

    def test_several_metrics_say_that_their_intervals_hold_together(self) -> None:
        two = [self.metric(-1, -0.07, -0.03), self.metric(1, -0.07, 0.03)]
        both = Verdict(two, 100, 2.0, is_joint=True)
        assert "95 % for both metrics together, over 100 test examples" in both.lines[1]
        three = Verdict([*two, two[0]], 100, 2.0, is_joint=True)
        assert "95 % for all 3 metrics together, over 100 test examples" in three.lines[1]
        older = Verdict.from_json({key: value for key, value in three.to_json().items() if key != "is_joint"})
        assert "95 % for each metric by itself, over 100 test examples" in older.lines[1]


class Costs(nn.Module):
    """A model that is nothing but the costs of all examples, a column per metric."""

    def __init__(self, costs: Tensor) -> None:
        super().__init__()
        self.register_buffer("costs", costs)

    def forward(self, rows: Tensor) -> Tensor:
        return self.get_buffer("costs")[rows]


def column_of(predictions: Tensor, _: Tensor, *, column: int) -> Tensor:
    return predictions[:, column]


def is_decided(metrics: int, draw: torch.Generator, size: int = 60) -> bool:
    """Whether two models whose costs are drawn alike get a verdict."""
    ours, theirs = (Costs(torch.rand(size, metrics, generator=draw)) for _ in range(2))
    named = {str(i): fm.MeanCost(partial(column_of, column=i), name=str(i)) for i in range(metrics)}
    test = fm.Evaluation(TensorDataset(torch.arange(size)), named, lambda model, rows: (model(rows[0]), rows[0]), size)
    run: Any = SimpleNamespace(model=ours, reference=theirs.state_dict(), verdict=None, seed=0, steps=1)
    run.settings, run.trained_steps = {}, {"alone": 1}
    problem: Any = SimpleNamespace(target="tgt", evaluations=lambda split: {"tgt": test})
    verdict = give_verdict(run, problem)
    assert verdict is not None
    assert len(verdict.metrics) == metrics
    return verdict.decision != "no difference shown"


@pytest.mark.parametrize("metrics", [1, 5])
def test_models_that_do_not_differ_get_a_verdict_in_at_most_5_percent_of_cases(metrics: int) -> None:
    draw, cases = torch.Generator().manual_seed(metrics), 400
    decided = sum(is_decided(metrics, draw) for _ in range(cases)) / cases
    assert decided <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / cases)  # three standard errors of the simulation
    assert decided > 0.01, "a rule that never decides would hold it, too"


@pytest.mark.parametrize(
    ("options", "is_selected"), [({}, False), ({"select": "best"}, True), ({"checkpoint": "best_so_far"}, True)]
)
def test_where_validation_chose_the_weights_the_verdict_says_that_it_chose_none_of_the_other(
    options: dict[str, Any], is_selected: bool
) -> None:
    problem = with_test(fm.accuracy)
    verdict = give_verdict(fit(replace(FLOOR, **options), problem), problem)
    assert verdict is not None
    assert any("stopping early may be part" in line for line in verdict.lines) is is_selected


def test_the_reference_of_a_diverged_floor_is_none() -> None:
    branches = {"alone": {"tgt": 1.0}, "aux": {"aux": 1.0}}
    assert fit(fm.ForkMerge(branches, interval=4, floor=True), diverging_problem(6, "tgt")).reference is None
