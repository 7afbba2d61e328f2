"""A connection to a cluster: kept by whoever needs it longest; versions that differ are named."""

from __future__ import annotations

import signal

import pytest
import ray

import forkmerge as fm
from forkmerge.engine.executors.ray.cluster import Cluster, check_versions, own_versions, shortfall


def test_equal_versions_pass() -> None:
    check_versions(own_versions(), "10.0.0.2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "1.0"}, r"a worker on node 10\.0\.0\.2 has torch 1\.0 instead of \d"),
        ({"Python": "2.7", "forkmerge": "0.0"}, r"has Python 2\.7 instead of 3\.\d+ and forkmerge 0\.0 instead of"),
    ],
)
def test_other_versions_are_refused_by_name(change: dict[str, str], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        check_versions({**own_versions(), **change}, "10.0.0.2")


def test_a_missing_package_is_named() -> None:
    versions = own_versions()
    del versions["forkmerge"]
    with pytest.raises(fm.ProblemError, match="forkmerge missing instead of"):
        check_versions(versions, "10.0.0.2")


def test_a_connection_of_somebody_else_is_used_and_left(on_ray: fm.Ray) -> None:
    other = fm.Ray(workers=1, address="10.0.0.2:6379")
    cluster = Cluster(other)
    assert cluster.is_shared
    cluster.close()
    cluster.close()
    assert ray.is_initialized()
    assert "2 workers with 1 CPUs and 3 GPUs each on a cluster that has 2 CPUs and" in shortfall(2, 1, 3)


def test_a_termination_is_not_left_to_ray(on_ray: fm.Ray) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert not getattr(handler, "__module__", "").startswith("ray")
