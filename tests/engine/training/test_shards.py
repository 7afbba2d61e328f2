"""What of a model is on this rank, and the names of its tensors without wrappers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from forkmerge.engine.training.shards import (
    is_sharded,
    local_of,
    plain_name,
    reshard,
    sharded_like,
    spans_ranks,
    version_of,
    wrapper_prefix,
)
from forkmerge.engine.training.state import Layout
from spanning_models import HELD_OUT, WRAPPERS, net, one_rank, sharded


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def test_a_local_shard_shares_the_memory_of_its_tensor() -> None:
    weight = sharded(net())[0].weight
    local_of(weight).fill_(2.0)
    assert is_sharded(weight)
    assert bool((weight.full_tensor() == 2.0).all())
    plain = torch.ones(3)
    assert local_of(plain) is plain


def test_a_tensor_made_of_a_shard_is_spread_as_the_other_and_shares_its_memory() -> None:
    weight = sharded(net())[0].weight
    made = sharded_like(row := torch.zeros(8, 6), weight)
    made.add_(1.0)
    assert (made.shape, made.placements) == (weight.shape, weight.placements)  # type: ignore[attr-defined]
    assert bool((row == 1.0).all())
    assert sharded_like(row, torch.ones(1)) is row


def test_writing_to_either_changes_the_version() -> None:
    weight = sharded(net())[0].weight
    versions = [version_of(weight)]
    with torch.no_grad():
        weight.add_(1.0)
        versions.append(version_of(weight))
        weight.to_local().add_(1.0)
    versions.append(version_of(weight))
    assert len(set(versions)) == 3


def test_after_a_forward_pass_the_root_is_gathered_until_it_is_resharded() -> None:
    """The premise of the trap: should torch change it, this says so."""
    model = sharded(net())
    model(HELD_OUT)
    assert not is_sharded(model[4].weight)
    assert is_sharded(model[0].weight)
    reshard(model)
    assert is_sharded(model[4].weight)


def test_a_layout_of_a_gathered_model_is_that_of_its_shards() -> None:
    model = sharded(net())
    model(HELD_OUT)
    assert all(map(is_sharded, Layout(model).parameters))


@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_names_do_not_depend_on_wrappers(wrapper: str) -> None:
    model = WRAPPERS[wrapper](net())
    assert list(Layout(model).signature) == [name for name, _ in net().named_parameters()]
    assert list(Layout(model).signature.values()) == [list(p.shape) for p in net().parameters()]
    assert spans_ranks(model) == (wrapper not in ("plain", "compiled"))


def test_a_compiled_part_of_a_model_has_the_name_that_it_has_uncompiled() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"), nn.Linear(2, 1))
    assert wrapper_prefix(model) == ""
    assert plain_name("0._orig_mod.weight", "") == "0.weight"
    assert next(iter(Layout(model).signature)) == "0.weight"
