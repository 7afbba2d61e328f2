"""Seeds derived from a run's own, and the global random states of torch, numpy and `random`."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, *parts: object) -> int:
    """Return a 63-bit seed that depends on `seed` and on every part, and on nothing else."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def uniform(seed: int, *parts: object) -> float:
    """Return a number in [0, 1) as a pure function of its arguments."""
    return (derive(seed, *parts) >> 10) / (1 << 53)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give the caller its torch, numpy and `random` global states back on exit."""
    python, numpy_state, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002 - the state user code draws from
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def set_random_state(seed: int) -> None:
    """Seed torch (all devices), numpy and `random`, so that user code may draw from any of them."""
    # torch.manual_seed also queues seeds for devices nobody uses, at 100 times the cost of this line.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    random.seed(seed)
