"""Modules that cannot be trained in rows are refused, by name and with what to pass instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forkmerge as fm
from forkmerge.engine.training.module_checks import check_module
from problems import SGD, fit, plain_net, shared_problem
from spanning_models import net, one_rank, sharded


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        del state


def test_extra_state_is_refused_before_training() -> None:
    with pytest.raises(fm.ProblemError, match="keeps extra state"):
        fm.SingleTask().fit(shared_problem(), model=lambda: Extra(6, 3), optimizer=SGD, steps=1)


def test_lazy_modules_are_refused_with_what_to_do() -> None:
    with pytest.raises(fm.ProblemError, match=r"'weight' is lazy.*run the model on one batch"):
        check_module(nn.LazyLinear(3))


def test_data_parallel_modules_are_refused_with_what_to_pass() -> None:
    with pytest.raises(fm.ProblemError, match=r"wrapped in DataParallel: pass the module inside it, model\.module"):
        fit(net=nn.DataParallel(plain_net()))


def test_models_that_span_ranks_are_refused_unless_they_may() -> None:
    with one_rank():
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        parallel = nn.parallel.DistributedDataParallel(plain_net())
        distributed = torch.distributed.tensor.distribute_module(plain_net(), mesh)
        for model in (parallel, distributed, sharded(net()), torch.compile(parallel, backend="eager")):
            with pytest.raises(fm.ProblemError, match=r"spans ranks.*pass the plain module, or .*in_place=True"):
                check_module(model)
            check_module(model, may_span=True)


def test_flattened_shards_are_refused_with_what_to_use() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """Named as torch's own, which needs a GPU."""

    with pytest.raises(fm.ProblemError, match=r"wrapped in FullyShardedDataParallel.*fully_shard"):
        check_module(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2))), may_span=True)


def test_sharded_buffers_are_refused_by_name() -> None:
    with one_rank():
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.distributed.tensor.distribute_tensor(torch.ones(2), mesh))
        with pytest.raises(fm.ProblemError, match=r"buffer 'table' is sharded"):
            check_module(model, may_span=True)


def test_something_that_is_no_module_is_refused() -> None:
    with pytest.raises(fm.ProblemError, match=r"model must be a torch\.nn\.Module"):
        fit(net=3)
    with pytest.raises(fm.ProblemError, match=r"model must be a torch\.nn\.Module, got str"):
        fit(net=lambda: "net")
