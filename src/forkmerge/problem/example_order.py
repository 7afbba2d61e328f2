"""Which examples a step sees, and every random number of it.

Everything here is a pure function of (seed, stream, step, micro-batch, purpose), so a run needs to save
nothing but its step counter, and branches see the same batch of a stream at the same step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forkmerge.problem.randomness import derive, uniform

# Above this many examples a stored permutation costs more memory than it is worth (8 bytes each, and one
# per epoch crossed); an index bijection then computes the shuffled position on the fly.
LARGEST_PERMUTATION = 1 << 18
_ROUNDS = 6  # Feistel rounds: four give a pseudo-random permutation, two more are a margin
Words = npt.NDArray[np.uint64]


def batch_indices(size: int, batch: int, position: int, seed: int, stream: str) -> Tensor:
    """Return the example indices of the `position`-th batch of a stream, as a tensor [batch].

    The stream is one endless concatenation of epochs, each a fresh permutation of the `size` examples,
    cut every `batch` examples: all batches have one size, also where it exceeds the data set.
    """
    parts: list[Tensor] = []
    at, end = position * batch, (position + 1) * batch
    while at < end:
        epoch, offset = divmod(at, size)
        take = min(end - at, size - offset)
        parts.append(_shuffled(size, derive(seed, stream, "epoch", epoch), offset, take))
        at += take
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sample_indices(size: int, count: int, seed: int, *parts: object) -> list[int]:
    """Return `count` distinct indices below `size`, in ascending order, as a function of the seed."""
    return sorted(_shuffled(size, derive(seed, "sample", *parts), 0, min(count, size)).tolist())


def pick_task(tasks: Sequence[str], weights: Sequence[float], seed: int, step: int) -> str:
    """Return the task of a step when weights are sampling weights (one task per step)."""
    ends = list(accumulate(weights))
    # bisect_right: a task of weight 0 has an empty interval and can never be drawn.
    return tasks[min(bisect_right(ends, uniform(seed, "task", step) * ends[-1]), len(tasks) - 1)]


def _shuffled(size: int, seed: int, offset: int, count: int) -> Tensor:
    if size <= LARGEST_PERMUTATION:
        return _permutation(size, seed)[offset : offset + count]
    moved = _bijection(np.arange(offset, offset + count, dtype=np.uint64), size, seed)
    return torch.from_numpy(moved.astype(np.int64))


@lru_cache(maxsize=64)
def _permutation(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def _bijection(index: Words, size: int, seed: int) -> Words:
    """Permute [0, size) by a Feistel network on the next even power of two, walking out-of-range cycles."""
    half = np.uint64(((size - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(derive(seed, "round", i)) for i in range(_ROUNDS)]
    result: Words = index.copy()
    pending = np.ones(len(index), dtype=bool)
    while pending.any():
        left, right = result[pending] >> half, result[pending] & low
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & low)
        result[pending] = (left << half) | right
        pending[pending] = result[pending] >= size
    return result


def _mix(value: Words) -> Words:
    """Scramble 64-bit words (multiply and xor-shift, with wrap-around)."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(29))) * np.uint64(0xD1342543DE82EF95)
    mixed: Words = value ^ (value >> np.uint64(32))
    return mixed
