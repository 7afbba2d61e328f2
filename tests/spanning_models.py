"""A fork of one small model in every form that it may have: plain, compiled, DDP, FSDP2; in one process or several."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import forkmerge as fm

BRANCHES = {"alone": {"ctr": 1.0}, "joint": {"ctr": 1.0, "dwell": 0.5}}
ROUNDS, STEPS, BATCH = 3, 3, 16
_draw = torch.Generator().manual_seed(1)
INPUTS = torch.randn(ROUNDS * STEPS * BATCH, 6, generator=_draw)
LABELS = {
    "ctr": INPUTS.sum(1, keepdim=True) + torch.randn(len(INPUTS), 1, generator=_draw),
    "dwell": INPUTS[:, :3].sum(1, keepdim=True),
}
HELD_OUT = torch.randn(23, 6, generator=_draw)
# Between the tasks, so that the best merge lies between the branches.
TRUTH = HELD_OUT.sum(1, keepdim=True) * 0.7 + HELD_OUT[:, :3].sum(1, keepdim=True) * 0.3


def net() -> nn.Sequential:
    """Layers whose first dimensions two ranks cannot halve: 5 rows are cut into 3 and 2, one row into 1 and 0."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))


def wide_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 1))


def norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def sharded(model: nn.Sequential) -> nn.Module:
    """FSDP2 as users apply it: the larger layers, and the root for the rest."""
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2]):
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def compiled_shards(model: nn.Sequential) -> nn.Module:
    for layer in model:
        layer.compile(backend="eager")
    return sharded(model)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "plain": lambda model: model,
    "fsdp": sharded,
    "ddp": nn.parallel.DistributedDataParallel,
    "ddp with bucket views": lambda model: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True),
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "compiled ddp": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
    "compiled layers, fsdp": compiled_shards,
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


class Training:
    """A loop around a fork, which may be left and gone on with at any round.

    Args:
        model: The model, wrapped as it may be.
        search: Of the fork.
        in_place: Whether the model is lent to the branches.
        optimizer: Makes the optimizer.
        share: Which examples of every batch this rank reads.
    """

    def __init__(
        self,
        model: nn.Module,
        search: fm.Search | None = None,
        *,
        in_place: bool = True,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
        share: slice = slice(None),
    ) -> None:
        self.model, self.in_place, self.share = model, in_place, share
        self.forked = fm.fork(model, optimizer(model), BRANCHES, search=search, in_place=in_place)
        self.outcomes: list[list[Any]] = []

    def train(self, index: int) -> None:
        for branch in self.forked:
            for step in range(index * STEPS, (index + 1) * STEPS):
                rows = slice(step * BATCH, (step + 1) * BATCH)
                outputs = branch.model(INPUTS[rows][self.share])
                losses = {task: mse_loss(outputs, labels[rows][self.share]) for task, labels in LABELS.items()}
                branch.optimizer.zero_grad()
                sum(weight * losses[task] for task, weight in branch.task_weights.items()).backward()
                branch.optimizer.step()

    def merge(self, score: Callable[[nn.Module], Any] | None = None, **options: Any) -> fm.MergeOutcome:
        outcome = self.forked.merge(score or minus_loss, **options)
        self.outcomes.append([outcome.coefficients, outcome.score, outcome.candidates])
        return outcome

    def run(self, rounds: range = range(ROUNDS)) -> Training:
        for index in rounds:
            self.train(index)
            self.merge()
        return self

    def numbers(self) -> list[Any]:
        """Coefficients, score and candidates of every merge, as they come back from JSON."""
        return [[c, s, [[point, value] for point, value in candidates]] for c, s, candidates in self.outcomes]

    def digest(self) -> str:
        """A checksum of the last merge."""
        if not self.in_place:
            return digest(self.forked.merged_into(net()))
        return digest(self.model)


def minus_loss(model: nn.Module) -> float:
    return -mse_loss(model(HELD_OUT), TRUTH).item()


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(model: nn.Module) -> str:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    tensors = [whole(parameter.detach()) for parameter in model.parameters()] + list(model.buffers())
    return hashlib.sha256(b"".join(tensor.cpu().contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
