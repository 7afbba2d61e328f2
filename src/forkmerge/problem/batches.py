"""From a data set to the batch of a step, in this process or in loader workers, with the same bits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from multiprocessing import parent_process
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from forkmerge.errors import ProblemError
from forkmerge.problem.batch_reader import Reader, reader_of
from forkmerge.problem.definition import Evaluation, Stream
from forkmerge.problem.error_facts import note_origin
from forkmerge.problem.example_order import batch_indices
from forkmerge.problem.prefetch import SideStream, move, read_ahead
from forkmerge.problem.randomness import derive, set_random_state

Batches = Generator[Any, None, None]
_EVALUATION = "an evaluation"


def read_examples(source: Stream, indices: list[int], seed: int, name: str = "a stream") -> Any:
    """Return the batch of the given examples.

    Each example, and the collate function, is read under its own global random state derived from `seed`, so
    augmentations may draw from torch, numpy or `random` and give the same bits in any process.
    """
    examples = []
    for position, index in enumerate(indices):
        set_random_state(derive(seed, "example", position))
        examples.append(_example(source, index, name))
    set_random_state(derive(seed, "collate"))
    return _collated(source, examples, indices, name)


def _example(source: Stream | Evaluation, index: int, name: str) -> Any:
    try:
        return source.dataset[index]
    except Exception as error:
        note_origin(error, f"the data set of {name}, example {index}")
        raise


def _collated(source: Stream | Evaluation, examples: list[Any], indices: Sequence[int], name: str) -> Any:
    try:
        return (source.collate_fn or default_collate)(examples)
    except Exception as error:
        note_origin(error, f"making a batch of {name}", examples=indices, batch=examples)
        raise


class _Examples(Dataset[Any]):
    """The endless stream as a data set whose items are whole batches, addressed by position."""

    def __init__(self, name: str, stream: Stream, seed: int) -> None:
        self.name, self.stream, self.seed = name, stream, seed

    def __getitem__(self, position: int) -> Any:
        indices = _indices(self.name, self.stream, self.seed, position)
        seed = derive(self.seed, self.name, "batch", position)
        return read_examples(self.stream, indices.tolist(), seed, f"stream {self.name!r}")


def batches(
    name: str,
    stream: Stream,
    positions: range | list[int],
    seed: int,
    device: torch.device,
    *,
    workers: int = 0,
) -> Batches:
    """Return the batches at the given positions of a stream, on a device; close it if it is left before its end.

    Data that can be read in whole batches is read in this process whatever `workers` says: a worker would only add
    copies. Examples read one by one are never read by a thread: they may draw from the global random states.
    """
    reader = reader_of(stream)
    if reader is not None:
        return _read_whole(reader, partial(_indices, name, stream, seed), positions, device, f"stream {name!r}")
    source = _Examples(name, stream, seed)
    if workers == 0:
        return (move(source[position], device) for position in positions)
    loader = DataLoader(
        source,
        batch_size=None,  # items are whole batches already
        sampler=positions,
        num_workers=workers,
        multiprocessing_context=loader_context(),
        generator=torch.Generator().manual_seed(seed),  # otherwise the loader draws from the global state
        collate_fn=_identity,
        pin_memory=device.type == "cuda",
    )
    started = iter(loader)  # now: processes are better forked before a thread of another stream runs
    return (move(batch, device) for batch in started)


def loader_context() -> str | None:
    """Return how processes that read examples start: as usual, but a worker process forks them, where that is safe.

    It was spawned, and what it starts would be, too: for every segment anew, in seconds, and only what pickles.
    """
    return "fork" if parent_process() is not None and sys.platform == "linux" else None


def check_loaders(streams: Iterable[Stream]) -> None:
    """Refuse processes that read examples inside worker processes where these cannot fork them."""
    if sys.platform != "linux" and any(reader_of(stream) is None for stream in streams):
        raise ProblemError(
            f"workers and loader_workers do not go together on {sys.platform}, where every worker would start its "
            "loaders anew for every segment: leave loader_workers out, since every worker reads its own examples, or "
            "use workers=1."
        )


def evaluation_batches(
    evaluation: Evaluation, order: Sequence[int], seed: int, device: torch.device, *, chunk: int | None = None
) -> Batches:
    """Return the batches of an evaluation's examples in the given order, on a device.

    Close it if it is left before its end. An example that is read by itself is read under a random state of its own,
    wherever it stands.

    Args:
        evaluation: The examples.
        order: Their indices.
        seed: The run's seed.
        device: Where batches go.
        chunk: The size of all batches, the last filled up with copies of its last example; None takes the
            evaluation's `batch_size` and leaves the last one short.
    """
    size = chunk or evaluation.batch_size
    starts = range(0, len(order), size)
    reader = reader_of(evaluation)
    missing = -len(order) % size if chunk else 0
    if reader is not None:
        whole = torch.as_tensor([*order, *[order[-1]] * missing])
        return _read_whole(reader, lambda start: whole[start : start + size], starts, device, _EVALUATION)

    def read(at: int) -> Any:
        chosen, examples = order[at : at + size], []
        for index in chosen:
            set_random_state(derive(seed, "evaluation", index))
            examples.append(_example(evaluation, index, _EVALUATION))
        examples += examples[-1:] * (size - len(examples) if chunk else 0)
        set_random_state(derive(seed, "evaluation collate", chosen[0]))
        return move(_collated(evaluation, examples, chosen, _EVALUATION), device)

    return (read(at) for at in starts)


def _indices(name: str, stream: Stream, seed: int, position: int) -> torch.Tensor:
    return batch_indices(stream.size, stream.batch_size, position, seed, name)


def _read_whole(
    reader: Reader, indices: Callable[[int], torch.Tensor], positions: Sequence[int], device: torch.device, name: str
) -> Batches:
    def read(position: int) -> Any:
        chosen = indices(position)
        try:
            return reader.read(chosen)
        except Exception as error:
            note_origin(error, f"the data set of {name}", examples=chosen.tolist())
            raise

    if len(positions) == 1 or not reader.is_worth_a_thread(device):
        for position in positions:
            yield move(read(position), device)
    elif device.type == "cuda":
        side = SideStream(device)
        with closing(read_ahead(lambda position: side.send(partial(read, position)), positions)) as ahead:
            for sent in ahead:
                yield side.receive(sent)
    else:
        with closing(read_ahead(read, positions)) as ahead:
            for batch in ahead:
                yield move(batch, device)


def _identity(batch: Any) -> Any:
    return batch
