"""The same batches, and the same randomness, for every branch of one's own loop, from any loader."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from forkmerge.errors import ProblemError
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state


class LoaderList:
    """The loaders of a round, numbered alike in all branches of a fork.

    A loader is known by its data set, or by itself where it has none. One that is made anew in every branch is taken
    for the one of the same type and length that another branch has used and that nobody holds any more: data sets that
    are alike and in use are different ones.
    """

    def __init__(self) -> None:
        self._data: list[Any] = []  # held, so that no other object gets their addresses

    def number(self, loader: Iterable[Any], used: Collection[int]) -> int:
        """Return the number of a loader; `used` are those of the loaders that the branch has used before."""
        data = getattr(loader, "dataset", loader)
        indices = [index for index in range(len(self._data)) if self._data[index] is data]
        if not indices:
            indices = [index for index in range(len(self._data)) if index not in used and self._replaces(data, index)]
        if not indices:
            indices = [len(self._data)]
            self._data.append(data)
        self._data[indices[0]] = data
        return indices[0]

    def _replaces(self, data: Any, index: int) -> bool:
        held_here_only = sys.getrefcount(self._data[index]) <= 2  # the list's reference, and the argument's
        return held_here_only and _alike(data, self._data[index])


class PairedPasses:
    """The passes of one branch over loaders, each a pure function of the fork's seed, the round, loader and pass.

    Args:
        seed: The fork's.
        loaders: The loaders of the round, of all branches.
        round_index: The round.
        counts: Passes so far, by the number of the loader.
    """

    def __init__(
        self, seed: int, loaders: LoaderList, round_index: int = 0, counts: Mapping[int, int] | None = None
    ) -> None:
        self.seed, self.loaders, self.round_index, self.counts = seed, loaders, round_index, dict(counts or {})
        self._open = 0
        self._callers: ExitStack | None = None

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the next pass over a loader; see `ForkedBranch.paired`."""
        if getattr(loader, "persistent_workers", False):
            raise ProblemError(
                "a loader with persistent_workers=True keeps its workers' random states from one pass to the next, so "
                "branches would get different augmentations: make it with persistent_workers=False."
            )
        number = self.loaders.number(loader, self.counts)
        count = self.counts.get(number, 0)
        self.counts[number] = count + 1
        seed = derive(self.seed, "paired", self.round_index, count, *([number] if number else []))
        with self._callers_states_kept(), _seeded_generators(loader, seed):
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
    def _callers_states_kept(self) -> Iterator[None]:
        """Give the caller its random states back once the last pass under way has ended: several may be zipped."""
        if not self._open:
            self._callers = ExitStack()
            self._callers.enter_context(random_state_kept())
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open and self._callers is not None:
                self._callers.close()


def _alike(data: Any, other: Any) -> bool:
    return type(data) is type(other) and getattr(data, "__len__", int)() == getattr(other, "__len__", int)()


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
