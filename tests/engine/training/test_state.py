"""A branch's tensors as flat rows."""

from __future__ import annotations

import torch

from forkmerge.engine.training.state import State


def test_a_state_is_tested_for_finite_numbers_piece_by_piece() -> None:
    row = torch.zeros(3_000_000)
    state = State(0, {"float32": row})
    assert state.is_finite()
    row[-1] = float("nan")
    assert not state.is_finite()
