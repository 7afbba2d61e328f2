"""A connection to a cluster: kept by whoever needs it longest; versions that differ are named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray
from ray.exceptions import AuthenticationError

import forkmerge as fm
from command_line import TINY
from forkmerge.engine.executors.ray.cluster import Cluster, check_versions, own_versions, shortfall, take_resting

_DRIVER = """
import sys
from pathlib import Path
import ray
import forkmerge as fm
from _asserts import assert_same_run

recipe = fm.load_recipe("tiny:recipe")
serial = recipe.fit(threads=1)
joined = fm.Ray(workers=1, address=sys.argv[1], working_dir=".")
with joined.connected():
    assert ray.get_runtime_context().gcs_address == sys.argv[1]
    Path("tiny.py").unlink()  # workers have nothing but what was sent to them
    assert_same_run(serial, recipe.fit(threads=1, executor=joined))
assert len(serial.rounds) == 3
"""


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


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"no Ray cluster answers at 127\.0\.0\.1:1: Connection refused"),
        ("nowhere.invalid:6379", r"no Ray cluster answers at nowhere\.invalid:6379: "),
        ("[::1]:1", r"no Ray cluster answers at \[::1\]:1: "),
        ("head", r"'head' is not an address: write HOST:PORT, auto or local"),
        ("head:port", "'head:port' is not an address"),
        ("head:99999", "'head:99999' is not an address"),
        ("ray://head:10001", "is an address of Ray's client.*ray job submit"),
    ],
)
@pytest.mark.parametrize("is_variable", [False, True])
def test_an_address_where_no_cluster_is_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str, message: str, is_variable: bool
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would try for minutes"))
    if is_variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(fm.ProblemError, match=message):
        Cluster(fm.Ray(address=None if is_variable else address))


@pytest.mark.parametrize("error", [ConnectionError("Failed to connect"), AuthenticationError("no token")])
def test_a_cluster_that_refuses_is_told_with_how_it_is_given_a_token(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", Mock(side_effect=error))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            fm.ProblemError, match=f"no Ray cluster lets this process in at {address}: .*RAY_AUTH_TOKEN"
        ):
            Cluster(fm.Ray(address=address))


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


def test_a_cluster_joined_by_its_address_makes_the_problem_from_the_folder_it_is_sent(
    on_ray: fm.Ray, tmp_path: Path
) -> None:
    for worker in take_resting(on_ray, on_ray.workers):
        worker.end()  # so that there is room for that of another driver
    (tmp_path / "tiny.py").write_text(TINY)
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}  # where assertions are
    words = [sys.executable, "-c", _DRIVER, address]
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ray.cluster_resources()["CPU"] == on_ray.workers, "the cluster goes on"
