"""From predictions to metrics: every kind of metric, in evaluation mode, without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.problem.scoring import evaluating, measure
from problems import Augmented, Counted, examples, minus_loss, noisy_net, plain_net, predict_target, seeded


def evaluate(metrics: Any, dataset: Any = None, **options: Any) -> fm.Evaluation:
    data = TensorDataset(*examples(24, 2)) if dataset is None else dataset
    return fm.Evaluation(data, metrics, predict_target, **options)


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

    def test_text_that_reads_like_a_number_is_none(self) -> None:
        metric = {"text": lambda predictions, targets: "0.5"}
        with pytest.raises(fm.ProblemError, match=r"metric 'text' must give one number, got '0\.5'"):
            fm.measure(seeded(plain_net), evaluate(metric))


def test_a_data_set_is_not_an_evaluation() -> None:
    with pytest.raises(fm.ProblemError, match=r"measure needs an Evaluation, got TensorDataset: wrap the data set"):
        measure(nn.Linear(2, 2), TensorDataset(torch.zeros(4, 2), torch.zeros(4)))


def test_examples_that_are_no_pairs_need_a_predict() -> None:
    triples = TensorDataset(*(torch.zeros(4, 2) for _ in range(3)))
    message = r"with labels, and its batches are \[float32\[4, 2\], float32\[4, 2\], float32\[4, 2\]\]: pass predict="
    with pytest.raises(fm.ProblemError, match=message):
        measure(nn.Linear(2, 2), fm.Evaluation(triples, fm.accuracy))
