"""The actor behind a worker: it says what its node has, and needs nothing of ours to do so."""

from __future__ import annotations

import subprocess
import sys

import ray

import forkmerge as fm
from forkmerge.engine.executors.ray.actor import actor_class
from forkmerge.engine.executors.ray.cluster import own_versions

_WITHOUT_US = """
import pickle, sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "forkmerge":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
worker = pickle.loads(sys.stdin.buffer.read())
print(worker.__name__, "forkmerge" in sys.modules)
"""


def test_it_can_be_made_where_this_package_is_missing() -> None:
    pickled = ray.cloudpickle.dumps(actor_class().__ray_metadata__.modified_class)
    shown = subprocess.run([sys.executable, "-c", _WITHOUT_US], input=pickled, capture_output=True, check=True).stdout
    assert shown.decode().split() == ["ForkMergeWorker", "False"]


def test_it_says_which_versions_its_node_has(on_ray: fm.Ray) -> None:
    actor = actor_class().options(num_cpus=0).remote()
    versions, node, process = ray.get(actor.facts.remote())
    assert versions == own_versions()
    assert node == ray.get_runtime_context().get_node_id()
    assert process > 0
    ray.kill(actor)
