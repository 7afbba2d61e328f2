"""Recommendation: fields in one table, towers, and experts behind gates."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import forkmerge as fm
from forkmerge.models import ESMM, Fields, MMoE


class TestRecommenders:
    SIZES: ClassVar = [5, 3, 7]

    def batch(self) -> tuple[Tensor, Tensor]:
        codes = torch.stack([torch.randint(0, n, (6,)) for n in self.SIZES], 1)
        return codes, torch.randn(6, 2)

    def test_fields_of_one_table_do_not_overlap(self) -> None:
        fields = Fields(self.SIZES, width=4)
        codes = torch.tensor(list(itertools.product(*(range(n) for n in self.SIZES))))
        parts = fields(codes).view(-1, 3, 4)
        assert len({tuple(row.tolist()) for row in parts.flatten(0, 1)}) == sum(self.SIZES)

    @pytest.mark.parametrize("kind", [ESMM, MMoE])
    def test_every_task_gets_a_logit_and_every_parameter_a_gradient(self, kind: Any) -> None:
        model = kind(self.SIZES, 2, ["click", "buy"], width=4, hidden=(8,))
        logits = model(*self.batch())
        assert {task: tuple(value.shape) for task, value in logits.items()} == {"click": (6,), "buy": (6,)}
        sum(value.square().mean() for value in logits.values()).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []
        assert list(model(*self.batch(), tasks=["buy"])) == ["buy"]

    def test_in_the_entire_space_a_purchase_is_a_click_and_a_purchase(self) -> None:
        torch.manual_seed(0)
        model = ESMM(self.SIZES, 2, ["click", "buy"], width=4, hidden=(8,), entire_space=True).double().eval()
        codes, numbers = self.batch()
        features = model.encoder(codes, numbers.double())
        click, purchase = (torch.sigmoid(model.heads[task](features).squeeze(1)) for task in ("click", "buy"))
        for tasks in (None, ["buy"]):
            logits = model(codes, numbers.double(), tasks=tasks)
            torch.testing.assert_close(torch.sigmoid(logits["buy"]), click * purchase)
        with torch.no_grad():
            model.heads["click"][-1].bias.fill_(80.0)
            model.heads["buy"][-1].bias.fill_(-80.0)
        assert model(codes, numbers.double())["buy"].isfinite().all()

    def test_mmoe_mixes_experts_by_its_gates(self) -> None:
        model = MMoE(self.SIZES, 2, ["click", "buy"], width=4, experts=3, bottom=(8,), hidden=(8,)).eval()
        codes, numbers = self.batch()
        with torch.no_grad():
            for gate in model.gates.values():
                gate.weight.zero_()
                gate.bias.copy_(torch.tensor([-1e9, 0.0, -1e9]))
        features = model.encoder(codes, numbers)
        expected = model.heads["buy"](model.experts[1](features)).squeeze(1)
        torch.testing.assert_close(model(codes, numbers)["buy"], expected)

    def test_numbers_alone_and_codes_alone(self) -> None:
        assert Fields([], 3, width=4)(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 3)).shape == (2, 4)
        assert Fields([2, 2], width=4)(torch.zeros(2, 2, dtype=torch.long)).shape == (2, 8)
        with pytest.raises(fm.ProblemError, match="at least one field"):
            Fields([])
