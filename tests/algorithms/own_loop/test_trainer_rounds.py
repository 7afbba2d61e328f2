"""Trainers that own their loop are used as they are; a merge of what they trained is one of `fork`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import forkmerge as fm

BRANCHES = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 0.5}}
INPUTS = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
GOALS = {"tgt": INPUTS.sum(1, keepdim=True), "aux": INPUTS[:, :1]}


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def score(model: nn.Module) -> float:
    return -mse_loss(model(INPUTS), GOALS["tgt"] + 0.1).item()


class PlainTrainer:
    """A loop with its own optimizer."""

    def __init__(self, model: nn.Module, task_weights: dict[str, float], steps: int) -> None:
        self.model, self.task_weights, self.steps = model, task_weights, steps

    def train(self) -> None:
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        for _ in range(self.steps):
            optimizer.zero_grad()
            outputs = self.model(INPUTS)
            sum(weight * mse_loss(outputs, GOALS[task]) for task, weight in self.task_weights.items()).backward()  # type: ignore[union-attr]
            optimizer.step()


def make_trainer(branch: Any, steps: int) -> PlainTrainer:
    return PlainTrainer(branch.model, branch.task_weights, steps)


def test_rounds_are_the_obvious_loop_over_copies_and_merges_of_state_dicts() -> None:
    model, twin = make_model(), make_model()
    outcomes = list(fm.rounds(model, BRANCHES, make_trainer, score, count=3, steps=4))
    for outcome in outcomes:
        states: dict[str, dict[str, Tensor]] = {}
        for name, weights in BRANCHES.items():
            copy = make_model()
            copy.load_state_dict(twin.state_dict())
            PlainTrainer(copy, weights, steps=4).train()
            states[name] = copy.state_dict()
        twin.load_state_dict(fm.merge_states(states, outcome.coefficients))
        assert outcome.score == score(twin)
        assert outcome.score >= max(outcome.branch_scores.values())
    assert len(outcomes) == 3
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())


def test_the_model_has_the_weights_of_the_last_merge_after_every_round() -> None:
    model = make_model()
    for outcome in fm.rounds(model, BRANCHES, make_trainer, score, count=2, steps=2):
        assert score(model) == outcome.score


@pytest.mark.parametrize("wrong", [{"count": 0}, {"steps": 0}, {"search": "binari"}])
def test_a_wrong_argument_is_told_before_the_first_round(wrong: dict[str, Any]) -> None:
    with pytest.raises(fm.ProblemError):
        fm.rounds(make_model(), BRANCHES, make_trainer, score, **{"count": 2, "steps": 2, **wrong})


def test_a_model_that_is_all_frozen_is_refused_with_what_to_do() -> None:
    with pytest.raises(fm.ProblemError, match=r"nothing of the model can be trained.*is_trainable=True"):
        fm.rounds(make_model().requires_grad_(False), BRANCHES, make_trainer, score, count=1, steps=1)


def test_a_learning_rate_that_nobody_would_apply_is_refused() -> None:
    branches = {"alone": {"tgt": 1.0}, "fast": {"task_weights": {"tgt": 1.0}, "lr_scale": 3.0}}
    with pytest.raises(fm.ProblemError, match="branch 'fast': set its learning rate"):
        fm.rounds(make_model(), branches, make_trainer, score, count=1, steps=1)


def test_the_trainer_of_transformers_is_used_unmodified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    # Without Hugging Face's data sets, `tests/datasets` is a module of their name, which transformers takes for them.
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)
    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = BertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, (32, 6), generator=generator)
    labels = (tokens < 10).sum(1).gt(3).long()
    data = [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]
    made = []

    def make(branch: Any, steps: int) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=8,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        made.append(Trainer(model=branch.model, args=arguments, train_dataset=data[: 16 * len(branch.task_weights)]))
        return made[-1]

    evaluation = fm.Evaluation(data, {"nll": fm.nll})  # type: ignore[arg-type]  # a list is a map-style data set
    frozen = model.bert.embeddings.requires_grad_(False).word_embeddings.weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = fm.rounds(model, BRANCHES, make, lambda m: -fm.measure(m, evaluation)["nll"], count=2, steps=3)
    for outcome in run:
        assert -fm.measure(model, evaluation)["nll"] == outcome.score
    assert [trainer.state.global_step for trainer in made] == [3] * 4
    assert all(t.model.bert.embeddings.word_embeddings.weight.data_ptr() == frozen.data_ptr() for t in made)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert "classifier.weight" in changed
    assert not any("embeddings" in name for name in changed)
