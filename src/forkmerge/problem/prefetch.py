"""Batches of the next steps, prepared by one background thread while the current step runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")

DEPTH = 2  # batches ready or under way besides the one in use


def read_ahead(read: Callable[[T], R], items: Iterable[T], depth: int = DEPTH) -> Generator[R, None, None]:
    """Yield `read(item)` for every item in order, read by a thread up to `depth` items ahead.

    An error of `read` is raised where its item is due. The thread ends with the generator, also when that is closed.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="forkmerge-feed")
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def change(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every tensor, and anything else with `.to`, in nested lists, tuples and mappings."""
    if hasattr(batch, "to"):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: change(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(change(value, function) for value in batch)
    return batch


def move(batch: Any, device: torch.device) -> Any:
    """Move every tensor in nested lists, tuples and mappings (and anything with `.to`) to a device."""
    return change(batch, lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x.to(device))


class SideStream:
    """Copies batches to a CUDA device on a stream of its own, so that a copy runs beside the step before.

    `send` is for the reading thread, `receive` for the thread that trains. Objects other than tensors are moved by
    `receive`: their inner tensors cannot be marked as used by two streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        # Data that is on the device already may still be on its way there.
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def send(self, read: Callable[[], Any]) -> tuple[Any, torch.cuda.Event]:
        """Read a batch, pin it and start its copy."""
        with torch.cuda.stream(self.stream):
            batch = change(read(), self._copy)
            return batch, self.stream.record_event()

    def receive(self, sent: tuple[Any, torch.cuda.Event]) -> Any:
        """Let the training stream wait for the copy, and the allocator know that it uses the memory."""
        batch, arrived = sent
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        change(batch, lambda x: x.record_stream(current) if _is_on(x, self.device) else None)
        return move(batch, self.device)

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device == self.device:
            return value
        # The allocator of pinned memory keeps it until the copy has ended, although nobody here does.
        pinned = value.pin_memory() if value.device.type == "cpu" else value
        return pinned.to(self.device, non_blocking=True)


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device == device
