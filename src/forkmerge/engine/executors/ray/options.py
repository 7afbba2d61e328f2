"""`Ray(...)`: which cluster, how many workers there, and what each of them needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from forkmerge.engine.executors.devices import check_devices
from forkmerge.engine.executors.executor_options import ExecutorOptions
from forkmerge.errors import ProblemError, check_count, check_packages

if TYPE_CHECKING:
    from forkmerge.engine.executors.ray.executor import RayExecutor

_CLIENT = "ray://"
_LAST_PORT = 65535


@dataclass(frozen=True)
class Ray(ExecutorOptions):
    """Train branches, and do whole runs, on a Ray cluster, with the bits of a serial run.

    An existing cluster is joined: the one at `address`, the one that the environment variable RAY_ADDRESS names, or
    one that runs on this machine. Where there is none, one is started on this machine and stopped with the run.

    Args:
        workers: How many calls are done at the same time, each by a Ray actor of its own.
        num_cpus: CPUs that each of them reserves; also the default of `threads`, on which the bits depend.
        num_gpus: GPUs that each of them reserves; the driver needs one, too.
        address: Of the cluster, such as "10.0.0.1:6379"; "local" starts one whatever runs here.
        working_dir: A folder with the code of the problem, sent to workers that cannot import it otherwise.
        attempts: How often a call is made, at most, before a run ends because its workers or nodes are lost.

    Example:
        >>> import forkmerge as fm
        >>> fm.Ray(workers=4, num_gpus=1).workers
        4
    """

    workers: int = 2
    num_cpus: float = 1
    num_gpus: float = 0
    address: str | None = None
    working_dir: str | None = None
    attempts: int = 3

    def __post_init__(self) -> None:
        check_packages("Ray", "ray", {"ray": "ray"})
        check_count("workers", self.workers)
        check_count("attempts", self.attempts)
        for name, least in (("num_cpus", "more than 0"), ("num_gpus", "0 or more")):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and name == "num_cpus"):
                raise ProblemError(f"{name} must be {least}, got {value!r}.")
        if self.address is not None:
            check_address(self.address)
        if self.working_dir is not None and not Path(self.working_dir).is_dir():
            raise ProblemError(f"working_dir {self.working_dir!r} is not a folder.")

    @property
    def threads(self) -> int:
        """Threads per branch, unless `fit` is told: as many as a worker has CPUs."""
        return max(int(self.num_cpus), 1)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The first GPU that a process sees: Ray shows each worker its own."""
        return check_devices(["cuda:0"]) if self.num_gpus else ()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Keep the cluster for all that runs inside, so that it is joined or started only once."""
        from forkmerge.engine.executors.ray.cluster import Cluster

        cluster = Cluster(self)
        try:
            yield
        finally:
            cluster.close()

    def open(self, workers: int | None = None) -> RayExecutor:
        """Return an executor, whose workers begin to start.

        Args:
            workers: How many there is work for, where that is fewer.
        """
        from forkmerge.engine.executors.ray.executor import RayExecutor

        return RayExecutor(self, min(self.workers, workers or self.workers))


def check_address(address: str) -> tuple[str, int] | None:
    """Return host and port of a cluster, or None for an address that Ray finds out; what is no address is refused.

    Args:
        address: What Ray is told.
    """
    if address in ("auto", "local"):
        return None
    if address.startswith(_CLIENT):
        raise ProblemError(
            f"{address} is an address of Ray's client, over which states cannot stay on their nodes. Run this on a "
            "node of the cluster with address='auto', or hand it in with `ray job submit`."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise ProblemError(f"{address!r} is not an address: write HOST:PORT, auto or local.")
    return host.strip("[]"), int(port)
