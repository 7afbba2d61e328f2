"""The whole state of a module that was not written with checkpoints in mind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from forkmerge.engine.storage.json_codec import pack
from forkmerge.methods.torchjd.module_state import export_state, import_state, is_plain, opaque_attributes


class Learner(nn.Module):
    """Learns with an optimizer of its own, counts, and keeps a buffer in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.inner = nn.BatchNorm1d(2)
        self.optimizer = torch.optim.Adam([self.scale], lr=0.1)
        self.seen: dict[str, Any] = {"steps": 0, "last": [torch.zeros(2), None]}
        self.rule = torch.tanh

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        value = self.rule(self.inner(inputs) * self.scale).square().sum()
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()
        self.seen = {"steps": self.seen["steps"] + 1, "last": [inputs[0], value.item()]}
        return value.detach()


INPUTS = torch.linspace(-1, 2, 8).view(4, 2)


def test_a_module_goes_on_from_an_exported_state_as_it_would_have_gone_on_itself() -> None:
    module, other = Learner(), Learner()
    for _ in range(3):
        module(INPUTS)
    state = copy.deepcopy(export_state(module))
    expected = [module(INPUTS).item() for _ in range(2)]
    other(2 * INPUTS)  # whatever it did before is forgotten
    import_state(other, state)
    assert [other(INPUTS).item() for _ in range(2)] == expected
    assert other.seen["steps"] == 5
    assert torch.equal(other.inner.running_mean, module.inner.running_mean)
    assert other.optimizer.param_groups[0]["params"][0] is other.scale


def test_an_exported_state_is_plain_data() -> None:
    module = Learner()
    module(INPUTS)
    pack(export_state(module))  # refuses what is not


@pytest.mark.parametrize("value", [None, 1, 2.5, "a", torch.ones(1), [1, (2, {"a": None})], torch.float32])
def test_what_is_data(value: Any) -> None:
    assert is_plain(value)


@pytest.mark.parametrize("value", [{1, 2}, object(), [print], {"a": {3}}])
def test_what_is_not_is_named_as_opaque_unless_it_can_be_called(value: Any) -> None:
    module = Learner()
    module.treasure = value
    assert not is_plain(value)
    assert opaque_attributes(module) == ["treasure"]
    module.treasure = print
    assert opaque_attributes(module) == []
