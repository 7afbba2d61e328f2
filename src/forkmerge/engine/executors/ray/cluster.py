"""A Ray cluster: joined where there is one, started and stopped where there is none; versions must agree."""

from __future__ import annotations

import logging
import math
import os
import platform
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from forkmerge._version import __version__
from forkmerge.engine.executors.ray.options import Ray, check_address
from forkmerge.errors import ProblemError

_PATIENCE = 10.0  # seconds for a connection to a node

_connected: list[Ray] = []  # by this module, not by the user; the last one inside all others
_resting: dict[tuple[float, float], list[Any]] = {}  # workers that wait for their next executor, by what they reserve


class Cluster:
    """This process's connection to a cluster: an existing one of the process is used, and left as it is.

    Args:
        options: Which cluster.
    """

    def __init__(self, options: Ray) -> None:
        self._is_mine = not ray.is_initialized()
        if self._is_mine:
            with _signal_handler_stays():
                _connect(options)
        elif options.working_dir is not None and not _connected:
            raise ProblemError(
                "Ray was initialised before: pass working_dir to that call, as "
                f"ray.init(runtime_env={{'working_dir': {options.working_dir!r}}}), or leave ray.init out."
            )
        self._options: Ray | None = options
        _connected.append(options)

    def close(self) -> None:
        """Leave the cluster, which ends if it was started here; may be called again."""
        if self._options is None:
            return
        _connected.remove(self._options)
        self._options = None
        if not _connected:
            for workers in _resting.values():
                for worker in workers:
                    worker.end()
            _resting.clear()
        if self._is_mine:
            ray.shutdown()

    @property
    def is_shared(self) -> bool:
        """Whether somebody else keeps the connection, too."""
        return len(_connected) > 1


def take_resting(options: Ray, count: int) -> list[Any]:
    """Return up to so many workers that have done the calls of another executor, and reserve the same."""
    resting = _resting.get((options.num_cpus, options.num_gpus), [])
    taken, resting[:] = resting[:count], resting[count:]
    return taken


def let_rest(options: Ray, workers: Sequence[Any]) -> None:
    """Keep workers until the connection ends, or somebody takes them: to start one takes seconds."""
    _resting.setdefault((options.num_cpus, options.num_gpus), []).extend(workers)


@contextmanager
def _signal_handler_stays() -> Iterator[None]:
    """Undo that Ray lets SIGTERM end this process at once: a run writes a checkpoint first."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _connect(options: Ray) -> None:
    common: dict[str, Any] = {"logging_level": logging.WARNING}
    if options.working_dir is not None:
        common["runtime_env"] = {"working_dir": os.path.abspath(options.working_dir)}
    address = options.address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_answers(address)
    if address != "local":
        try:
            ray.init(address=address, **common)
            return
        except (ConnectionError, AuthenticationError) as error:
            if address != "auto" or options.address is not None:
                raise ProblemError(
                    f"no Ray cluster lets this process in at {address}: {_first_line(error)}. If it asks for a token, "
                    "export RAY_AUTH_MODE=token here, and the RAY_AUTH_TOKEN of its nodes."
                ) from None
        except RuntimeError as error:
            if "ersion mismatch" not in str(error):
                raise
            raise ProblemError(f"this process and the Ray cluster at {address} differ: {_one_line(error)}") from None
    _start(options, common)


def _check_answers(address: str) -> None:
    """Refuse an address where nothing answers: Ray would try for minutes."""
    endpoint = check_address(address)
    if endpoint is not None:
        try:
            socket.create_connection(endpoint, timeout=_PATIENCE).close()
        except OSError as error:
            raise ProblemError(f"no Ray cluster answers at {address}: {error.strerror or error}.") from None


def _start(options: Ray, common: Mapping[str, Any]) -> None:
    """Start a cluster on this machine alone, which reports to nobody."""
    before = os.environ.get("RAY_USAGE_STATS_ENABLED")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address="local",
            num_cpus=math.ceil(options.workers * options.num_cpus),
            include_dashboard=False,
            _system_config={"worker_niceness": 0},  # or training would wait for whatever else the machine does
            **common,
        )
    finally:
        if before is None:
            del os.environ["RAY_USAGE_STATS_ENABLED"]


def own_versions() -> dict[str, str]:
    """Return the versions that driver and workers must share."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": version("torch"),
        "forkmerge": __version__,
    }


def check_versions(theirs: Mapping[str, str], node: str) -> None:
    """Refuse a worker whose versions are not this process's, by name."""
    differing = [
        f"{name} {theirs.get(name, 'missing')} instead of {own}"
        for name, own in own_versions().items()
        if theirs.get(name) != own
    ]
    if differing:
        raise ProblemError(
            f"a worker on node {node} has {' and '.join(differing)}: the bits of a run depend on it. Install the same "
            "versions on all nodes."
        )


def shortfall(workers: int, num_cpus: float, num_gpus: float) -> str:
    """Say what workers ask for, and what the cluster has."""
    has = ray.cluster_resources()
    asked = f"{workers} workers with {num_cpus:g} CPUs" + (f" and {num_gpus:g} GPUs" if num_gpus else "") + " each"
    return f"{asked} on a cluster that has {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs"


def is_alive(node: str) -> bool:
    """Whether a node, by its id, is still part of the cluster."""
    return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
