"""Which executor a run gets, before there is one: how many workers, where, and with what."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch

from forkmerge.engine.executors.devices import Devices, check_devices, resolve_workers
from forkmerge.engine.executors.executor import Executor
from forkmerge.engine.executors.serial import local_executor
from forkmerge.errors import ProblemError, check_count


class ExecutorOptions(ABC):
    """What `fit(executor=…)` takes: it opens executors, as many as are needed, each with workers of its own.

    Attributes:
        workers: How many calls are done at the same time, at most.
        shares_files: Whether workers see the files of this process whatever they are.
    """

    workers: int
    shares_files: ClassVar[bool] = False

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads per branch, where `fit` is not told; the bits depend on it."""

    @property
    @abstractmethod
    def devices(self) -> tuple[torch.device, ...]:
        """Where workers train, in turn; none leaves a model where it is."""

    @abstractmethod
    def open(self, workers: int | None = None) -> Executor:
        """Return an executor that has not been started.

        Args:
            workers: How many there is work for, where that is fewer.
        """

    def connected(self) -> AbstractContextManager[None]:
        """Keep what several executors can share as long as one is inside."""
        return nullcontext()


@dataclass(frozen=True)
class LocalOptions(ExecutorOptions):
    """Processes of this machine; a single worker is this process.

    Args:
        workers: How many.
        devices: Where they train, in turn.
    """

    shares_files: ClassVar[bool] = True
    workers: int = 1
    devices: tuple[torch.device, ...] = ()

    def __post_init__(self) -> None:
        """Refuse more processes than any machine can hold, before the first one starts."""
        check_count("workers", self.workers)
        most = max(4 * (os.cpu_count() or 1), 256)
        if self.workers > most:
            raise ProblemError(
                f"workers must be at most {most}, got {self.workers}: this machine has {os.cpu_count()} processors."
            )

    @property
    def threads(self) -> int:
        """This process's number of threads, divided."""
        return max(torch.get_num_threads() // self.workers, 1)

    def open(self, workers: int | None = None) -> Executor:
        """Return a serial executor, or processes that begin to start."""
        return local_executor(min(self.workers, workers or self.workers))


def executor_options(
    executor: ExecutorOptions | None, workers: int | None = None, devices: Devices | None = None
) -> ExecutorOptions:
    """Return the options of an executor from what `fit` is given: either those, or a number of local workers."""
    if workers is not None:
        check_count("workers", workers)
    if executor is None:
        return LocalOptions(resolve_workers(workers, devices), check_devices(devices))
    if not isinstance(executor, ExecutorOptions):
        raise ProblemError(f"executor must be options such as Ray(workers=4), got {executor!r}.")
    both = [name for name, value in (("workers", workers), ("devices", devices)) if value is not None]
    if both:
        kind = type(executor).__name__
        raise ProblemError(f"{both[0]} and an executor are given: say it there, as {kind}(workers=…, num_gpus=…).")
    return executor
