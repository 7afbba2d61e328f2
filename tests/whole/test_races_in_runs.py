"""Runs whose searches race their candidates end as those that evaluate all of them do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run, facts
from forkmerge.algorithms import validation
from forkmerge.algorithms.events import RoundFinished
from forkmerge.engine.merging import candidates as candidates_module
from problems import (
    SGD,
    Augmented,
    Stopped,
    conv_net,
    examples,
    fit,
    noisy_net,
    plain_net,
    predict_target,
    seeded,
    shared_problem,
)
from race_twin import full_loop


def patched(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """Run with the full loop instead of the race."""
    with monkeypatch.context() as patch:
        patch.setattr(candidates_module, "race", full_loop)
        return run()


def decided(run: Any) -> dict[str, Any]:
    """What a run found, without what losers' scores are known to be."""
    data = facts(run)
    for finished in data["rounds"]:
        finished.pop("examples")
        finished["candidates"] = [candidate["coefficients"] for candidate in finished["candidates"]]
    return data


def problem(metrics: Any = fm.nll, dataset: Any = None, **options: Any) -> fm.Problem:
    data = dataset or TensorDataset(*examples(101, 2))
    settings = {"batch_size": 8, **options}
    return shared_problem(validation=fm.Evaluation(data, metrics, predict_target, **settings))


ALGORITHMS: dict[str, fm.Algorithm] = {
    "greedy": fm.ForkMerge("per_auxiliary", interval=4),
    "grid": fm.ForkMerge("mixed", interval=4, search=fm.Grid(10)),
    "binary": fm.ForkMerge("mixed", interval=4, search="binary"),
    "sub-sample": fm.ForkMerge("per_auxiliary", interval=4, search_examples=37),
    "recompute": fm.ForkMerge("per_auxiliary", interval=4, bn="recompute", bn_batches=2),
    "snapshots": fm.ForkMerge("per_auxiliary", interval=4, checkpoint="best_so_far", validate_every=2, select="best"),
    "floor": fm.ForkMerge("per_auxiliary", interval=4, floor=True, refit=True),
}


class TestInARun:
    @pytest.mark.parametrize(
        ("name", "metric"), [("greedy", "accuracy"), ("recompute", "accuracy"), *((name, "nll") for name in ALGORITHMS)]
    )
    def test_a_run_is_the_one_of_the_full_loop_bit_for_bit(
        self, name: str, metric: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run() -> Any:
            return fit(ALGORITHMS[name], problem(getattr(fm, metric)), noisy_net)

        raced, twin = run(), patched(monkeypatch, run)
        assert_same_bits(raced, twin)
        assert decided(raced) == decided(twin)
        for one, other in zip(raced.searched, twin.searched, strict=True):
            assert one.examples["bound"] <= one.examples["evaluated"] <= other.examples["evaluated"]
            assert other.examples["evaluated"] == other.examples["full"] == one.examples["full"]
            for left, right in zip(one.candidates, other.candidates, strict=True):
                assert not right.is_bound
                assert left.score >= right.score if left.is_bound else left.score == right.score
        assert any(c.is_bound for finished in raced.searched for c in finished.candidates)

    @pytest.mark.parametrize("net", [plain_net, conv_net])
    def test_a_run_is_the_one_of_a_metric_that_does_not_add_up(self, net: Callable[[], nn.Module]) -> None:
        def share(predictions: Tensor, targets: Tensor) -> float:
            return fm.accuracy(predictions, targets)

        algorithm = fm.ForkMerge("per_auxiliary", interval=4)
        raced = fit(algorithm, problem({"share": fm.accuracy}), net)
        plain = fit(algorithm, problem({"share": share}), net)
        assert_same_bits(raced, plain)
        assert decided(raced) == decided(plain)
        assert [finished.examples for finished in plain.rounds] == [{}] * 3

    def test_data_sets_that_draw_for_every_example_race_as_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run() -> Any:
            return fit(fm.ForkMerge("per_auxiliary", interval=4), problem(dataset=Augmented(61, 2)))

        raced = run()
        assert decided(raced) == decided(patched(monkeypatch, run))
        # Whichever chunk an example is in, it is drawn alike.
        evaluation = problem(dataset=Augmented(61, 2)).target_validation
        assert raced.metrics["nll"] == pytest.approx(fm.measure(raced.model, evaluation)["nll"], rel=1e-6)

    def test_several_metrics_race_where_all_add_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        metrics = {"accuracy": fm.accuracy, "nll": fm.nll}

        def run() -> Any:
            return fit(fm.ForkMerge("per_auxiliary", interval=4), problem(metrics))

        raced = run()
        assert decided(raced) == decided(patched(monkeypatch, run))
        assert raced.rounds[0].examples
        mixed = fit(fm.ForkMerge("per_auxiliary", interval=4), problem({**metrics, "plain": lambda p, t: 1.0}))
        assert not mixed.rounds[0].examples

    def test_a_metric_used_against_its_direction_takes_full_passes(self) -> None:
        run = fit(fm.ForkMerge("mixed", interval=6), problem(fm.nll, higher_is_better={"nll": True}))
        assert not run.rounds[0].examples

    def test_predictions_that_are_not_by_example_take_full_passes(self) -> None:
        def labelled(model: nn.Module, batch: Any) -> Any:
            logits, targets = predict_target(model, batch)
            return logits[targets > 0], targets[targets > 0]

        validation = fm.Evaluation(TensorDataset(*examples(40, 2)), fm.accuracy, labelled, batch_size=7)
        run = fit(problem=shared_problem(validation=validation))
        assert not run.rounds[0].examples
        inputs, labels = examples(40, 2)
        logits, targets = labelled(run.model.eval(), (inputs, labels))
        assert run.metrics == {"accuracy": fm.accuracy(logits, targets)} == fm.measure(run.model, validation)

    def test_a_run_that_was_killed_ends_with_the_same_bits(self, tmp_path: Any) -> None:
        def stop(event: Any) -> None:
            if isinstance(event, RoundFinished) and event.round == 2:
                raise Stopped

        for name in ("snapshots", "floor"):
            whole = fit(ALGORITHMS[name], problem(), noisy_net)
            with pytest.raises(Stopped):
                fit(ALGORITHMS[name], problem(), noisy_net, folder=tmp_path / name, on_event=stop)
            again = fit(ALGORITHMS[name], problem(), noisy_net, folder=tmp_path / name, resume=True)
            assert_same_run(whole, again)

    @pytest.mark.parametrize("checkpoint", ["last", "best_in_interval"])
    def test_nothing_is_measured_twice(self, checkpoint: Any) -> None:
        seen: list[int] = []

        def predict(model: nn.Module, batch: Any) -> Any:
            seen.append(len(batch[0]))
            return predict_target(model, batch)

        data = TensorDataset(*examples(40, 2))
        for metric, passes in ((fm.accuracy, 1), (lambda p, t: fm.accuracy(p, t), 4)):
            validation = fm.Evaluation(data, metric, predict, batch_size=40)
            algorithm = fm.ForkMerge("mixed", interval=6, checkpoint=checkpoint)
            seen.clear()
            run = fit(algorithm, shared_problem(validation=validation), steps=6)
            ranked = 1 + 2 * (1 if checkpoint == "last" else 6 // algorithm.settings(problem()).validate_every_of(6))
            evaluated = run.rounds[0].examples.get("evaluated", 40 * passes)
            counting = 1 if run.rounds[0].examples else 0  # the chunk whose operations are counted
            # Before training, the few examples with the largest and smallest labels are looked at by themselves.
            assert seen.count(40) == ranked + evaluated // 40 + counting

    def test_a_branch_that_predicts_nan_is_left_out_where_costs_are_not_finite(self) -> None:
        broken: list[Tensor] = []

        def predict(model: nn.Module, batch: Any) -> Any:
            logits, targets = predict_target(model, batch)
            weight = model.heads["tgt"].weight.detach()
            if len(broken) < 1:
                broken.append(weight.clone())  # the model before training
            return (logits * torch.nan if torch.equal(weight, broken[0]) else logits), targets

        validation = fm.Evaluation(TensorDataset(*examples(24, 2)), fm.nll, predict)
        branches = {"alone": {"tgt": 1.0}, "idle": {"odd": 1.0}}
        run = fit(fm.ForkMerge(branches, interval=4), shared_problem(validation=validation), steps=4)
        assert run.rounds[0].branches["idle"].fault == "its validation score is not finite"
        assert run.coefficients == [{"alone": 1.0, "idle": 0.0}]


def test_the_operations_of_a_chunk_are_counted_once_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(validation, "turn_length", lambda *rest: calls.append(1) or 1)
    fit(fm.ForkMerge("per_auxiliary", interval=4), problem(), seeded(plain_net), optimizer=SGD)
    assert calls == [1]
