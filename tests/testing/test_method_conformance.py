"""The conformance kit for methods: it covers ours, and it fails for methods that break its rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from forkmerge.methods import EW, METHODS, LossMethod, Method, MethodState, View
from forkmerge.testing import MethodConformance, conformance_of_all
from paths import TESTS

CHECKS = [name for name in vars(MethodConformance) if name.startswith("test_")]


def failures(method: type[Method]) -> list[str]:
    """The checks of the kit that a method does not pass."""
    kit = type("Kit", (MethodConformance,), {"method": method})()
    failed = []
    for name in CHECKS:
        try:
            getattr(kit, name)()
        except Exception:
            failed.append(name)
    return failed


def test_it_has_a_class_for_every_method_of_ours() -> None:
    kits = conformance_of_all()
    assert {kit.method for kit in kits.values()} == set(METHODS.values())
    assert all(name == f"Test{kit.method.__name__}" for name, kit in kits.items())


def test_every_method_of_ours_is_put_through_it() -> None:
    text = "".join(path.read_text("utf-8") for path in (TESTS / "methods").glob("test_*.py"))
    assert [name for name in METHODS if f"(MethodConformance):\n    method = {name}\n" not in text] == []


def test_a_sound_method_passes() -> None:
    assert failures(EW) == []


@dataclass(frozen=True)
class Forgetful(EW):
    """Counts steps in itself instead of in its state."""

    steps: ClassVar[list[int]] = []

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        self.steps.append(1)
        return torch.full_like(losses, 1 / len(self.steps))


@dataclass(frozen=True)
class Silent(LossMethod):
    """Says nothing about its state, its passes and its paper."""

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        return torch.ones_like(losses)


@dataclass
class Changeable(LossMethod):
    """Its options can be changed."""

    strength: float = 1.0

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        return torch.full_like(losses, self.strength)


@pytest.mark.parametrize(
    ("method", "checks"),
    [
        (Forgetful, {"test_interrupted_equals_uninterrupted", "test_copies_do_the_same"}),
        (Changeable, {"test_it_is_a_frozen_set_of_options"}),
        (Silent, {"test_its_docstring_is_a_data_sheet"}),
    ],
)
def test_a_method_that_breaks_a_rule_fails(method: Any, checks: set[str]) -> None:
    assert checks <= set(failures(method))
