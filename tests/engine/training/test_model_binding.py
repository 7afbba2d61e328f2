"""One module and one optimizer at work on many states: any module, any optimizer, any schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forkmerge as fm
from problems import SGD, plain_net, shared_problem


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        del state


def test_extra_state_is_refused_before_training() -> None:
    with pytest.raises(fm.ProblemError, match="keeps extra state"):
        fm.SingleTask().fit(shared_problem(), model=lambda: Extra(6, 3), optimizer=SGD, steps=1)


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["shared"]["count"] = self.state["shared"].get("count", 0) + 1
        super().step(closure)


def test_optimizer_state_that_belongs_to_no_parameter_is_refused_by_name() -> None:
    with pytest.raises(fm.ProblemError, match="Counting keeps state under 'shared'"):
        fm.SingleTask().fit(
            shared_problem(), model=plain_net, optimizer=lambda m: Counting(m.parameters(), lr=0.1), steps=1
        )
