"""Workers as the driver sees them: refused where they would compute something else, used again where they can."""

from __future__ import annotations

import re
from typing import Any

import pytest
import ray

import forkmerge as fm
from forkmerge.engine.executors.executor import Answer, Inputs, Tell, WorkerError
from forkmerge.engine.executors.ray import cluster, workers


def answer(payload: Any, inputs: Inputs, tell: Tell) -> Answer:
    """Give a value back."""
    return Answer(payload)


def make(index: int) -> Any:
    return answer


def raising(index: int) -> Any:
    raise OSError("the data set is not on this machine")


def test_a_worker_that_cannot_be_made_is_an_error(on_ray: fm.Ray) -> None:
    with on_ray.open(1) as executor:
        executor.start(raising)
        with pytest.raises(WorkerError, match="OSError: the data set is not on this machine"):
            executor.result(executor.submit(None))


def test_a_worker_of_other_versions_is_refused(on_ray: fm.Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "own_versions", lambda: {"torch": "99.0"})
    with fm.Ray(workers=1, num_cpus=0.5).open() as executor:
        executor.start(make)
        with pytest.raises(fm.ProblemError, match=r"a worker on node .* has torch \S+ instead of 99\.0"):
            executor.result(executor.submit(None))


def test_an_interrupted_worker_is_not_used_again(on_ray: fm.Ray) -> None:
    with on_ray.open(1) as executor:
        executor.start(make)
        assert executor.result(executor.submit(1)) == 1
        (worker,) = executor._workers
        assert worker.rest()
        worker.prepare(executor._make)
        assert executor.result(executor.submit(2)) == 2
        executor.interrupt()
        assert not worker.rest()


def test_the_loss_of_a_state_names_its_node_and_whether_that_is_gone(
    on_ray: fm.Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = ray.get_runtime_context().get_node_id()
    named = rf"node [\d.]+ \({node[:8]}\)"
    for nodes in ([node], []):  # this process puts its states on its own node
        assert re.fullmatch(f"the loss of its state on {named}", workers.loss_of_state(*nodes))
    monkeypatch.setattr(workers, "is_alive", lambda each: each != node)
    assert re.fullmatch(f"the loss of {named}, which had its state", workers.loss_of_state("f" * 56, node))
