"""Adapters are merged factor by factor on one backbone, and how far that is from merging updates is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification

import forkmerge as fm
from forkmerge.integrations.lora import adapter_rounds, factors_of, merge_discrepancy

TOKENS = torch.randint(20, (24, 6), generator=torch.Generator().manual_seed(0))
LABELS = {"tgt": (TOKENS < 10).sum(1).gt(3).long(), "aux": TOKENS[:, 0].lt(10).long()}
BRANCHES = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 1.0}, "odd": {"tgt": 0.5, "aux": 2.0}}
LAYER = "base_model.model.bert.encoder.layer.0.attention.self.query"


def adapted(task_type: str | None = "SEQ_CLS") -> PeftModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=6,
        hidden_dropout_prob=0.0,
    )
    lora = LoraConfig(r=2, lora_alpha=6, target_modules=["query", "value"], task_type=task_type)
    model = get_peft_model(BertForSequenceClassification(config), lora)
    for _, b in factors_of(model).values():
        nn.init.normal_(b, std=0.1)  # 0 as PEFT makes it, where nothing could go wrong
    return model


class PlainTrainer:
    def __init__(self, branch: Any, steps: int) -> None:
        self.branch, self.steps = branch, steps

    def train(self) -> None:
        model = self.branch.model
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
        for _ in range(self.steps):
            optimizer.zero_grad()
            logits = model(input_ids=TOKENS).logits
            for task, weight in self.branch.task_weights.items():
                (weight * cross_entropy(logits, LABELS[task])).backward(retain_graph=True)
            optimizer.step()


def score(model: nn.Module) -> float:
    return -cross_entropy(model(input_ids=TOKENS).logits, LABELS["tgt"]).item()


UNIFORM = fm.Fixed((1 / 3, 1 / 3, 1 / 3))


def run(model: PeftModel, **options: Any) -> list[Any]:
    return list(adapter_rounds(model, BRANCHES, PlainTrainer, score, **{"count": 2, "steps": 5, **options}))


def update(model: PeftModel, adapter: str = "default") -> Tensor:
    """What an adapter adds to the weight of a layer."""
    return model.get_submodule(LAYER).get_delta_weight(adapter).detach().clone()


def test_the_discrepancy_is_that_of_the_products_written_out() -> None:
    model = adapted()
    updates: dict[str, Tensor] = {}

    class Noting(PlainTrainer):
        def train(self) -> None:
            super().train()
            for name in factors_of(self.branch.model):
                layer = self.branch.model.get_submodule(name.partition(".lora_A")[0])
                updates[f"{self.branch.name} {name}"] = layer.get_delta_weight("default").detach().double()

    (merge,) = adapter_rounds(model, BRANCHES, Noting, score, count=1, steps=5, search=UNIFORM)
    off = total = 0.0
    for name in factors_of(model):
        right = sum(updates[f"{branch} {name}"] / 3 for branch in BRANCHES)
        layer = model.get_submodule(name.partition(".lora_A")[0])
        off += (layer.get_delta_weight("default").double() - right).square().sum().item()
        total += right.square().sum().item()
    assert merge.discrepancy == pytest.approx((off / total) ** 0.5, rel=1e-3)
    assert merge.discrepancy > 1e-4


def test_the_discrepancy_grows_with_the_interval_and_a_single_branch_has_none() -> None:
    short, long = (run(adapted(), count=1, steps=steps, search=UNIFORM)[0].discrepancy for steps in (2, 20))
    assert 0 < short < long
    pick = fm.Fixed((0.0, 1.0, 0.0))
    assert run(adapted(), count=1, search=pick)[0].discrepancy == 0


def test_with_frozen_a_factors_merge_as_updates_do() -> None:
    model = adapted()
    before = {name: a.detach().clone() for name, (a, _) in factors_of(model).items()}
    free = sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    merges = run(model, freeze_a=True, search=UNIFORM)
    assert [merge.discrepancy for merge in merges] == pytest.approx([0, 0], abs=1e-6)
    assert all(torch.equal(a, before[name]) for name, (a, _) in factors_of(model).items())
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) < 0.6 * free


def test_a_merge_is_scored_as_it_is_installed() -> None:
    model = adapted()
    for merge in adapter_rounds(model, BRANCHES, PlainTrainer, score, count=2, steps=5):
        with torch.no_grad():
            assert score(model.eval()) == merge.outcome.score
        assert merge.outcome.score >= max(merge.outcome.branch_scores.values())


def test_pefts_linear_combination_doubles_the_update_of_two_equal_adapters_and_ours_keeps_it() -> None:
    model = adapted(task_type=None)  # PEFT combines no adapters that come with a head
    expected = update(model)
    model.add_adapter("twin", model.peft_config["default"])
    state = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in state.items():
            if ".default." in name and "lora" in name:
                state[name.replace(".default.", ".twin.")].copy_(parameter)
    model.add_weighted_adapter(["default", "twin"], [0.5, 0.5], "peft", combination_type="linear")
    assert torch.allclose(update(model, "peft"), 2 * expected)
    factors = {name: (a.detach(), b.detach()) for name, (a, b) in factors_of(adapted()).items()}
    assert merge_discrepancy({"one": factors, "other": factors}, {"one": 0.5, "other": 0.5}) < 1e-6
    a, b = (fm.merge_states({n: {"w": f} for n in "xy"}, {"x": 0.5, "y": 0.5})["w"] for f in factors[_first(factors)])
    assert torch.allclose(b @ a * 3, expected)  # alpha / rank


def _first(factors: dict[str, Any]) -> str:
    return next(name for name in factors if name.startswith(LAYER))


def test_five_branches_hold_the_backbone_once_and_five_adapters() -> None:
    model = adapted()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    forked = fm.fork(model, torch.optim.SGD(trainable, lr=0.1), {name: {"tgt": 1.0} for name in "abcde"})
    models = [branch.model for branch in forked]
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for m in (model, *models) for t in m.parameters()
    }
    adapter = sum(parameter.nbytes for parameter in trainable)
    backbone = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    # The model itself, and five branches, whose trained rows are aligned.
    assert backbone + 6 * adapter <= sum(held.values()) <= backbone + 6 * adapter + 6 * 64 * len(trainable)
    assert adapter < backbone / 5


def test_a_model_without_adapters_is_refused() -> None:
    with pytest.raises(fm.ProblemError, match="needs a PeftModel with LoRA adapters, got Linear"):
        adapter_rounds(nn.Linear(2, 2), BRANCHES, PlainTrainer, score, count=1, steps=1)
