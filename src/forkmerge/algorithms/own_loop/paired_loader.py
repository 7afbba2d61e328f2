"""The same batches, and the same randomness, for every branch of one's own loop, from any loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from forkmerge.errors import ProblemError
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state


def paired_batches(loader: Iterable[Any], seed: int) -> Iterator[Any]:
    """Yield the batches of one pass over a loader, as a pure function of the seed.

    That holds for shuffling, augmentation (also in loader workers) and what the caller draws between two batches. The
    caller's random states come back when the pass ends.
    """
    if getattr(loader, "persistent_workers", False):
        raise ProblemError(
            "a loader with persistent_workers=True keeps its workers' random states from one pass to the next, so "
            "branches would get different augmentations: make it with persistent_workers=False."
        )
    with random_state_kept(), _seeded_generators(loader, seed):
        set_random_state(derive(seed, "loader"))
        iterator = iter(loader)
        position = 0
        while True:
            set_random_state(derive(seed, "data", position))
            try:
                batch = next(iterator)
            except StopIteration:
                return
            set_random_state(derive(seed, "forward", position))
            yield batch
            position += 1


@contextmanager
def _seeded_generators(loader: Any, seed: int) -> Iterator[None]:
    """Seed the generators a loader and its samplers own, and give them their states back on exit."""
    owners = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    owners.append(getattr(owners[2], "sampler", None))
    generators = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    before = [(generator, generator.get_state()) for generator in generators.values()]
    for index, (generator, _) in enumerate(before):
        generator.manual_seed(derive(seed, "generator", index))
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)
