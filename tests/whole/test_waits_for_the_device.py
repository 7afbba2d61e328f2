"""How often a step makes the host wait for the device: counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from forkmerge.methods import METHODS, LossMethod, MatrixMethod
from forkmerge.testing import small_problem, train_small

WAITS = {"cpu", "tolist", "__array__", "__contains__"}
"""Ways to the host that call no operator on a CPU, where everything is there already.

A copy into a tensor of the host, and `to` a device that is the model's or the host's, look alike there: `to` counts if
it names the CPU.
"""
Read = tuple[str, int, str]
"""How something was read back, how many numbers, and where."""
OPERATORS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}
TASKS = 3
NOT_OURS = ("torch/optim/", "torch/amp/grad_scaler")


class Functions(TorchFunctionMode):
    """Counts methods of tensors that read them back."""

    def __init__(self, seen: Counter[Read]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        arguments = (*args[1:], *(kwargs or {}).values())
        if name in WAITS or (name == "to" and "cpu" in [a for a in arguments if isinstance(a, str)]):
            count(self.seen, name, args[0])
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts operators whose result the host needs."""

    def __init__(self, seen: Counter[Read]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in OPERATORS or (name.startswith("index") and _has_mask(args[1])):
            count(self.seen, name, args[0])
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    return isinstance(indices, list) and any(index is not None and index.dtype == torch.bool for index in indices)


def count(seen: Counter[Read], name: str, tensor: torch.Tensor) -> None:
    """Count one, with the line of ours that asked, unless the optimizer or the scaler did."""
    frame, where = sys._getframe(2), ""
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if any(part in file for part in NOT_OURS):
            return
        if not where and "/forkmerge/" in file:
            where = f"{file.rsplit('/forkmerge/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    seen[name, tensor.numel(), where] += 1


def readbacks(method: Any, steps: int, **options: Any) -> Counter[Read]:
    """Count what a segment reads back."""
    seen: Counter[Read] = Counter()
    with Functions(seen), Operators(seen):
        train_small(method, small_problem(declared=True), cuts=(0, steps), **options)
    return seen


def per_step(method: Any, **options: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """What four more steps read back that four alone do not: segments have read-backs of their own.

    Returns, by what was done and where, how often and how many numbers at most.
    """
    longer, shorter = readbacks(method, 8, **options), readbacks(method, 4, **options)
    more = Counter((name, where) for name, _, where in longer.elements())
    more.subtract((name, where) for name, _, where in shorter.elements())
    sizes = {key: max(size for name, size, where in longer if (name, where) == key) for key in +more}
    return {key: (more[key], sizes[key]) for key in sizes}


LOSS = [name for name, kind in METHODS.items() if issubclass(kind, LossMethod)]
GRADIENT = [name for name, kind in METHODS.items() if not issubclass(kind, LossMethod | MatrixMethod)]


class TestReadBacks:
    def test_the_counters_see_the_ways_to_the_host(self) -> None:
        seen: Counter[Read] = Counter()
        value = torch.ones(2)
        with Functions(seen), Operators(seen):
            _ = value.tolist(), value.cpu(), value.to("cpu"), value[0].item(), bool(value.any()), float(value[0])
            _ = value[value > 0], torch.equal(value, value), value.to(device="cpu")
        assert sum(seen.values()) == 9
        assert {size for _, size, _ in seen} == {1, 2}

    @pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": 1.0}], ids=str)
    def test_fixed_weights_need_none(self, options: Any) -> None:
        assert per_step(None, **options) == {}

    @pytest.mark.parametrize("name", LOSS)
    def test_weighing_losses_needs_none(self, name: str) -> None:
        assert per_step(METHODS[name]()) == {}

    @pytest.mark.parametrize("name", GRADIENT)
    def test_a_gradient_method_needs_one_transfer(self, name: str) -> None:
        reads = per_step(METHODS[name]())
        assert sum(count for count, _ in reads.values()) == 4, reads
        assert all(size <= TASKS * (TASKS + 2) for _, size in reads.values()), reads  # K×K, and a few per task
