"""A Ray cluster of simulated nodes on this machine: a head for drivers, and two nodes with a worker each."""

from __future__ import annotations

import os
import random
import secrets
import signal
from pathlib import Path
from typing import Any

from processes import facts_of, send, wait_until_gone

NODES = 2
_OTHERS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")  # the title of a worker is that of its call
_NOTICED = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}


class RayNodes:
    """Starts the cluster, and ends workers and nodes of it; drivers join it by its address."""

    def __init__(self) -> None:
        # The processes of the cluster, and drivers, inherit these.
        os.environ.update(RAY_AUTH_TOKEN=secrets.token_hex(16), RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
        os.environ.pop("RAY_ADDRESS", None)
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _NOTICED}
        self._cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
        self._nodes: list[Any] = []
        self.restore()

    @property
    def address(self) -> str:
        """Where drivers join."""
        return str(self._cluster.address)

    def restore(self) -> None:
        """Put new nodes in the place of those that were ended."""
        while len(self._nodes) < NODES:
            self._nodes.append(self._cluster.add_node(num_cpus=1))

    def keep_states_on_nodes(self) -> None:
        """Go on with nodes that keep even the states of a small run, as they do with those of a large one."""
        os.environ.update(RAY_max_direct_call_object_size="1")
        while self._nodes:
            self._cluster.remove_node(self._nodes.pop())
        self.restore()

    def workers(self) -> list[int]:
        """Return the processes of workers."""
        raylets = {_raylet_of(node) for node in self._nodes}
        ids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (facts := facts_of(entry)) is not None:
                parent, title = facts
                if parent in raylets and title.startswith("ray::") and not title.startswith(_OTHERS):
                    ids.append(int(entry.name))
        return sorted(ids)

    def kill_node(self, draw: random.Random) -> bool:
        """End a node that has a worker, and all of its processes at once; False if no node has one."""
        on_node: dict[int, list[int]] = {}
        for each in self.workers():
            on_node.setdefault(_parent_of(each), []).append(each)
        busy = [node for node in self._nodes if _raylet_of(node) in on_node]
        if not busy:
            return False
        node = draw.choice(busy)
        for each in (_raylet_of(node), *on_node[_raylet_of(node)]):
            send(each, signal.SIGKILL)
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        return True

    def wait_until_free(self) -> list[int]:
        """Return workers that live on although their driver has ended."""
        return wait_until_gone(self.workers())

    def close(self) -> None:
        """End the cluster."""
        self._cluster.shutdown()


def _raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _parent_of(process: int) -> int:
    facts = facts_of(Path(f"/proc/{process}"))
    return 0 if facts is None else facts[0]
