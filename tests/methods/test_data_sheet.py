"""The data sheet of a method, read from its docstring."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import Tensor

from forkmerge.methods import METHODS, LossMethod, MethodState, View, facts_of


def test_options_are_documented() -> None:
    for kind in METHODS.values():
        text = inspect.getdoc(kind) or ""
        undocumented = [name for name in facts_of(kind)["options"] if f"\n    {name}: " not in text]
        assert not undocumented, kind


def test_facts_are_the_lines_and_sections_of_the_docstring() -> None:
    @dataclass(frozen=True)
    class Mine(LossMethod):
        """Halves every loss,
        twice.

        Args:
            times: How often.

        State: none.
        Passes: one.
        Target: not needed.

        References:
            Somebody, A Paper,
            2020.
        """

        times: int = 2

        def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
            return losses / losses / 2**self.times

    sheet = facts_of(Mine)
    assert (sheet["name"], sheet["uses"], sheet["options"]) == ("Mine", "losses", {"times": 2})
    assert sheet["summary"] == "Halves every loss, twice."
    assert (sheet["state"], sheet["passes"], sheet["target"]) == ("none", "one", "not needed")
    assert (sheet["memory"], sheet["heads"], sheet["note"]) == ("", "", "")
    assert sheet["paper"] == "Somebody, A Paper, 2020."
