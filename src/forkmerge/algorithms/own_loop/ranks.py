"""The ranks that train one model together, and what they have to agree on in a merge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.shards import is_sharded
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError

ScoreRanks = Literal["first", "all"]
"""Whose score is everybody's: that of rank 0, or the mean over all examples of all ranks."""


class Ranks:
    """The ranks that a model spans; a process that is alone agrees with itself and sends nothing.

    Args:
        groups: Process groups, one per dimension of the mesh: what is exchanged in each in turn reaches everybody.
        device: Where the tensors to exchange are.
    """

    def __init__(self, groups: Sequence[Any] = (), device: torch.device | None = None) -> None:
        self._groups, self._device = list(groups), device

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        """Return the ranks of a model."""
        groups: dict[str, Any] = {}
        device = None
        for parameter in model.parameters():
            if is_sharded(parameter):
                mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
                groups.update({group.group_name: group for group in mesh.get_all_groups()})
                device = device or torch.device(mesh.device_type)  # the shards may be kept on the CPU
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                groups[module.process_group.group_name] = module.process_group
                device = device or next(module.parameters()).device
        return cls(list(groups.values()), device)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are set on at least one rank."""
        return [bool(flag) for flag in self._reduced([float(flag) for flag in flags])]

    def all(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are set on every rank."""
        return [not flag for flag in self.any([not flag for flag in flags])]

    def agree(self, score: Callable[[], Any], checked: Callable[[Any], Tensor], ranks: ScoreRanks) -> Tensor:
        """Score on every rank, and return the same on every rank: one number, or one per example, [n].

        An error on one rank is one on all of them: the others would wait for it forever.

        Args:
            score: Scores on this rank.
            checked: Makes a tensor of what it gives: one number or one per example, in float64 on the CPU.
            ranks: "first" takes what rank 0 gives, "all" joins the examples of all ranks, or takes the mean of single
                numbers.
        """
        if not self._groups:
            return checked(score())
        try:
            result = score()
            is_ignored = ranks == "first" and not self._is_first()
            value = torch.tensor(math.nan, dtype=torch.float64) if is_ignored else checked(result)
        except Exception:
            self.any([True])
            raise
        if self.any([False])[0]:
            raise ProblemError("score failed on another rank, whose output says why. The branches are as they were.")
        return self._first(value) if ranks == "first" else self._joined(value)

    def share_buffers(self, binding: ModelBinding, states: Sequence[State]) -> None:
        """Give states the buffers that rank 0 has: each rank's BatchNorm has seen other batches."""
        names = list(binding.own_buffers)
        for state in states if self._groups and names else ():
            for name, is_changed in zip(names, self.any([name in state.buffers for name in names]), strict=True):
                if is_changed:
                    state.buffers[name] = self._broadcast(binding.buffer(state, name).clone())

    def _is_first(self) -> bool:
        import torch.distributed as dist

        return all(dist.get_rank(group) == 0 for group in self._groups)

    def _reduced(self, values: list[float]) -> list[float]:
        if not self._groups or not values:
            return values
        import torch.distributed as dist

        tensor = torch.tensor(values, device=self._device)
        for group in self._groups:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        result: list[float] = tensor.tolist()
        return result

    def _broadcast(self, tensor: Tensor) -> Tensor:
        import torch.distributed as dist

        sent = tensor.to(self._device).contiguous()
        for group in self._groups:
            dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
        return sent.to(tensor.device)

    def _first(self, value: Tensor) -> Tensor:
        dimensions, length = self._broadcast(torch.tensor([value.dim(), value.numel()])).tolist()
        values = value.reshape(-1) if value.numel() == length else torch.zeros(length, dtype=torch.float64)
        sent = self._broadcast(values)
        return sent if dimensions else sent[0]

    def _joined(self, value: Tensor) -> Tensor:
        parts = [value]
        for group in self._groups:
            parts = [part for each in parts for part in self._gathered(each, group)]
        if len({part.dim() for part in parts}) > 1:
            raise ProblemError("score gave one number on some ranks and one per example on others: give one form.")
        # A rounded exact sum, so that the order of the ranks does not matter.
        return torch.cat(parts) if value.dim() else torch.tensor(math.fsum(map(float, parts)) / len(parts)).double()

    def _gathered(self, value: Tensor, group: Any) -> list[Tensor]:
        import torch.distributed as dist

        size = dist.get_world_size(group)
        facts = torch.tensor([value.dim(), value.numel()], device=self._device)
        all_facts = [torch.empty_like(facts) for _ in range(size)]
        dist.all_gather(all_facts, facts, group=group)
        longest = max(int(entry[1]) for entry in all_facts)
        padded = torch.zeros(longest, dtype=torch.float64, device=self._device)
        padded[: value.numel()] = value.reshape(-1)
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        lengths = [(int(dimensions), int(length)) for dimensions, length in all_facts]
        return [
            part[:length].cpu().reshape([length] if dimensions else [])
            for part, (dimensions, length) in zip(parts, lengths, strict=True)
        ]
