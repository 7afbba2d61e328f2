"""Data and models of transformers need no adapter: dicts go in, logits and losses come out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

import forkmerge as fm
from forkmerge.problem.model_outputs import model_loss, predict_batch

LENGTH, VOCABULARY = 6, 20


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


class Sentences(Dataset[Any]):
    """Tokens with an attention mask, as a tokenizer gives them, and labels."""

    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.labels = (self.tokens < VOCABULARY // 2).sum(1).gt(LENGTH // 2).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = torch.ones(LENGTH, dtype=torch.long)
        return {"input_ids": self.tokens[index], "attention_mask": mask, "labels": self.labels[index]}

    def pairs(self) -> TensorDataset:
        return TensorDataset(self.tokens, self.labels)


def own_loss(model: nn.Module, batch: Any, tasks: Any, context: Any) -> dict[str, Tensor]:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return {tasks[0]: cross_entropy(logits, batch["labels"])}


def own_predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"]


def fit(losses: Any, **options: Any) -> fm.Run:
    streams = [fm.Stream(Sentences(24, seed), losses, task, 8) for seed, task in enumerate(("reviews", "news"))]
    problem = fm.Problem("reviews", streams, fm.Evaluation(Sentences(20, 5), {"nll": fm.nll}, **options))
    optimizer = fm.OptimizerOf("AdamW", lr=1e-2)
    return fm.ForkMerge("mixed", interval=2).fit(
        problem, model=bert, optimizer=optimizer, steps=4, threads=1, progress=False
    )


def test_a_run_on_dicts_without_adapters_has_the_bits_of_one_with_functions_written_for_them() -> None:
    plain, written = fit(fm.model_loss), fit(own_loss, predict=own_predict)
    assert plain.score == written.score
    assert plain.coefficients == written.coefficients
    assert plain.model is not None
    assert written.model is not None
    expected = written.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in plain.model.state_dict().items())


def test_dicts_and_pairs_are_measured_alike() -> None:
    model, data = bert(), Sentences(20, 1)
    by_dict = fm.measure(model, fm.Evaluation(data, {"nll": fm.nll, "accuracy": fm.accuracy}))
    by_pair = fm.measure(model, fm.Evaluation(data.pairs(), {"nll": fm.nll, "accuracy": fm.accuracy}))
    assert by_dict == pytest.approx(by_pair, rel=1e-6)  # with and without a mask are other kernels


def test_a_tokenizers_batch_is_a_dict_too() -> None:
    batch = BatchEncoding({"input_ids": torch.zeros(2, LENGTH, dtype=torch.long), "labels": torch.tensor([0, 1])})
    model = bert().eval()
    logits, labels = predict_batch(model, batch)
    assert torch.equal(labels, batch["labels"])
    assert torch.equal(logits, model(input_ids=batch["input_ids"]).logits)
    assert torch.equal(model_loss(model, batch, ["reviews"], None)["reviews"], cross_entropy(logits, labels))


def test_what_has_no_labels_or_no_loss_is_one_error() -> None:
    tokens = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)}
    with pytest.raises(fm.ProblemError, match=r"dicts with labels, and its batches are \{input_ids: int64"):
        predict_batch(bert(), tokens)
    with pytest.raises(fm.ProblemError, match="the model returned no loss of a batch"):
        model_loss(bert(), tokens, ["reviews"], None)
    with pytest.raises(fm.ProblemError, match="a stream of one task"):
        model_loss(bert(), {**tokens, "labels": torch.zeros(2).long()}, ["reviews", "news"], None)
    with pytest.raises(fm.ProblemError, match="whose batches are dicts"):
        model_loss(bert(), [tokens["input_ids"]], ["reviews"], None)
