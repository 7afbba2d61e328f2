"""A branch's tensors as flat rows."""

from __future__ import annotations

import torch
from torch import nn

import forkmerge as fm
from _asserts import assert_same_state
from branch_training import train
from forkmerge.engine.executors.state_bytes import from_wire, to_wire
from forkmerge.engine.training.state import State
from problems import ADAM, SGD, WIDTH, Net, noisy_net, seeded


def test_a_state_is_tested_for_finite_numbers_piece_by_piece() -> None:
    row = torch.zeros(3_000_000)
    state = State(0, {"float32": row})
    assert state.is_finite()
    row[-1] = float("nan")
    assert not state.is_finite()


def test_parameters_lie_at_aligned_places_of_one_row_per_dtype() -> None:
    net = Net(nn.Sequential(nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)))
    binding = fm.Training(SGD).binding(net)
    rows = binding.initial().rows
    assert set(rows) == {"float32", "bfloat16"}
    for part, parameter in zip(binding.layout.slices, binding.layout.parameters, strict=True):
        assert part.offset * parameter.element_size() % 64 == 0
        row = rows[part.row]
        assert parameter.data_ptr() == row.data_ptr() + part.offset * row.element_size()


def test_states_survive_a_trip_through_bytes() -> None:
    schedule = fm.SchedulerOf("MultiStepLR", milestones=[2, 4, 4, 8])
    state = train(seeded(noisy_net), optimizer=ADAM, scheduler=schedule).state
    back = from_wire(to_wire(state))
    assert isinstance(back, State)
    assert_same_state(back, state)
    assert back.optimizer_slots == state.optimizer_slots
    assert (back.groups, back.scheduler, back.scaler) == (state.groups, state.scheduler, state.scaler)
