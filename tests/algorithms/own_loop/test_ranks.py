"""What ranks agree on; two of them do so in tests/whole/test_models_that_span_ranks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import forkmerge as fm
from forkmerge.algorithms.own_loop.ranks import Ranks
from spanning_models import Training, net, one_rank, sharded


@pytest.fixture(params=["no group", "a group of one", "a mesh of two dimensions"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if request.param == "no group":
        yield Ranks.of(net())
        return
    with one_rank():
        model: nn.Module = sharded(net())
        if request.param != "a group of one":
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "shards"))
            model = torch.distributed.fsdp.fully_shard(net(), mesh=mesh)
        made = Ranks.of(model)
        assert made._groups
        yield made


def numbers(*values: float) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(values, dtype=torch.float64)


def as_it_is(value: Any) -> Any:
    return value


def test_one_rank_agrees_with_itself(ranks: Ranks) -> None:
    assert ranks.any([True, False]) == ranks.all([True, False]) == [True, False]
    assert ranks.any([]) == []
    for whose in ("first", "all"):
        assert ranks.agree(numbers(1.0, 2.0, 4.0), as_it_is, whose).tolist() == [1.0, 2.0, 4.0]  # type: ignore[arg-type]
        single = ranks.agree(lambda: torch.tensor(3.0, dtype=torch.float64), as_it_is, whose)  # type: ignore[arg-type]
        assert (single.dim(), float(single), single.dtype) == (0, 3.0, torch.float64)


def test_an_error_of_a_score_comes_through(ranks: Ranks) -> None:
    def fails() -> None:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        ranks.agree(fails, as_it_is, "first")


def test_whose_score_counts_must_be_one_of_two_words() -> None:
    training = Training(net())
    training.train(0)
    with pytest.raises(fm.ProblemError, match=r"ranks must be first or all, got 'mean'"):
        training.merge(ranks="mean")
