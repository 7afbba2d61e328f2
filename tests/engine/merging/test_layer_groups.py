"""Layer groups: what belongs to which, and merges by group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forkmerge as fm
from forkmerge.engine.merging.blend import Blender, blend_weights
from forkmerge.engine.merging.layer_groups import LayerGroups, check_layer_groups, collapsed, expanded
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import Layout, State
from problems import SGD, noisy_net, seeded, tied_net

GROUPS = {"lower": "body.0", "head": ["heads.tgt", "heads.aux.bias"]}


def states() -> tuple[ModelBinding, list[State], State]:
    model = seeded(noisy_net)
    binding = ModelBinding(model, SGD(model))
    origin, draw = binding.initial(), torch.Generator().manual_seed(0)
    branches = [origin.clone() for _ in range(3)]
    for state in branches:
        for row in state.rows.values():
            row += torch.randn(row.shape, generator=draw)
        state.buffers = {
            name: b.clone() + (torch.rand(b.shape, generator=draw) if b.is_floating_point() else 0)
            for name, b in model.named_buffers()
        }
    return binding, branches, origin


def values(binding: ModelBinding, state: State) -> dict[str, torch.Tensor]:
    """Every tensor of a state by name."""
    rows = {s.name: s.view(state.rows[s.row]) for s in binding.layout.slices}
    return {name: value.clone() for name, value in {**rows, **state.buffers}.items()}


def test_names_are_those_of_modules_or_parameters_and_what_is_left_is_the_rest() -> None:
    layout = Layout(noisy_net())
    groups = LayerGroups.of(GROUPS, layout)
    assert groups.names == ("lower", "head", "rest")
    in_groups = {s.name: groups.names[groups.group_of(s.name)] for s in layout.slices}
    assert {name for name, group in in_groups.items() if group == "lower"} == {"body.0.weight", "body.0.bias"}
    assert {n for n, g in in_groups.items() if g == "head"} == {"heads.tgt.weight", "heads.tgt.bias", "heads.aux.bias"}
    assert sum(groups.sizes) == sum(p.numel() for p in layout.parameters)
    assert groups.group_of("body.1.running_mean") == 2
    tops = LayerGroups.of("modules", layout)
    assert tops.names == ("body", "heads")
    assert tops.group_of("body.1.running_mean") == 0
    assert LayerGroups.of({"lower": "body.0"}, Layout(tied_net())).names == ("lower", "rest")


def test_a_merge_by_group_is_that_of_every_group_alone() -> None:
    """The twin: whole merges with each group's coefficients, of which the group's tensors are taken."""
    binding, branches, origin = states()
    groups = LayerGroups.of(GROUPS, binding.layout)
    for parts in (
        [(0.5, 0.3, 0.2), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)],
        [(0.0, 0.6, 0.4), (0.2, 0.3, 0.5), (1.0, 1.0, 0.0)],
        [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)],
    ):
        whole = [values(binding, blend_weights(binding, branches, p, origin.clone(), origin)) for p in parts]
        flat = tuple(value for part in parts for value in part)
        mine = values(binding, blend_weights(binding, branches, flat, origin.clone(), origin, groups))
        assert list(mine) == list(whole[0])
        for name, value in mine.items():
            assert torch.equal(value, whole[groups.group_of(name)][name]), name


def test_a_branch_of_coefficient_0_in_a_group_is_not_read_there() -> None:
    binding, branches, origin = states()
    groups = LayerGroups.of("modules", binding.layout)
    for piece_start, piece_end, group in groups.pieces["float32"]:
        if group == 0:
            branches[2].rows["float32"][piece_start:piece_end] = torch.nan
    out = blend_weights(binding, branches, (0.5, 0.5, 0.0, 0.2, 0.2, 0.6), origin.clone(), None, groups)
    assert out.is_finite()


def test_candidates_are_built_again_to_the_same_bits() -> None:
    binding, branches, origin = states()
    blend = Blender(binding, branches, origin.clone(), groups=LayerGroups.of("modules", binding.layout))
    one, other = (0.5, 0.5, 0.0, 0.2, 0.2, 0.6), (0.25, 0.5, 0.25)
    first = values(binding, blend(one))
    blend(other)
    again = values(binding, blend(one))
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_coefficients_are_written_once_where_all_groups_have_the_same() -> None:
    assert expanded((0.4, 0.6), 2, 3) == (0.4, 0.6) * 3
    assert collapsed((0.4, 0.6) * 3, 2) == (0.4, 0.6)
    assert collapsed((0.4, 0.6, 0.5, 0.5), 2) == (0.4, 0.6, 0.5, 0.5) == expanded((0.4, 0.6, 0.5, 0.5), 2, 2)
    groups = LayerGroups(("a", "b"), (("a",), ("b",)), {}, (30, 10))
    assert groups.parts((0.4, 0.6, 0.0, 1.0)) == [(0.4, 0.6), (0.0, 1.0)]
    assert groups.mean((0.4, 0.6, 0.0, 1.0)) == pytest.approx((0.3, 0.7))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("module", "unknown layer_groups 'module'"),
        (3, "layer_groups must be 'modules' or"),
        ({}, "layer_groups must be 'modules' or"),
        ({"a": []}, "layer_groups must be 'modules' or"),
        ({"rest": "body"}, "'rest' is the group of what no other has"),
    ],
)
def test_what_names_no_groups_is_refused(value: Any, message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        check_layer_groups(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": "bod"}, "names 'bod', which has no trainable parameter; the model's modules with some are body, heads"),
        ({"a": "body", "b": "body.0"}, "'body.0.weight' is in the groups 'a' and 'b'"),
        ({"a": ["body", "heads"]}, "at least two groups"),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused(value: Any, message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        LayerGroups.of(value, Layout(noisy_net()))
