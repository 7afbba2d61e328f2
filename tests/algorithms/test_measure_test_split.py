"""The test split: never read by `fit`, measured once, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import forkmerge as fm
from forkmerge.algorithms.measure_test_split import measure_test
from forkmerge.engine.storage.json_files import read_object, write_object
from forkmerge.engine.storage.run_folder import RunFolder
from problems import ADAM, TASKS, Untouchable, domains_problem, evaluation, fit, noisy_net, plain_net, shared_problem


@pytest.mark.parametrize("make", [shared_problem, domains_problem])
def test_the_test_split_is_never_read_during_fit(make: Any, tmp_path: Path) -> None:
    sealed = fm.Evaluation(Untouchable(), fm.accuracy)
    problem = make(test=dict.fromkeys(TASKS, sealed))
    algorithm = fm.ForkMerge("per_auxiliary", interval=4, refit=True, floor=True, bn="recompute", search_examples=5)
    run = fit(algorithm, problem, noisy_net, folder=tmp_path / "run")
    assert run.test is None
    assert problem.sealed().evaluations("test") == {}
    with pytest.raises(AssertionError, match="sealed"):
        fm.measure(run.model, problem.evaluations("test")["tgt"])


def test_the_test_split_is_measured_once_and_kept(tmp_path: Path) -> None:
    looks: list[int] = []

    def metric(predictions: torch.Tensor, targets: torch.Tensor) -> float:
        looks.append(len(targets))
        return 0.5

    problem = shared_problem(test=evaluation(40, metrics=metric))

    def fit() -> fm.Run:
        return fm.SingleTask().fit(
            problem, model=plain_net, optimizer=ADAM, steps=4, folder=tmp_path / "run", resume=True
        )

    run = fit()
    assert (run.test, looks) == (None, [])
    assert measure_test(run, problem, tmp_path / "run") == {"metric": 0.5}
    assert fit().test == {"metric": 0.5}
    assert measure_test(fit(), problem, tmp_path / "run") == {"metric": 0.5}
    result = tmp_path / "run/result.json"
    data = read_object(result)
    data["result"]["test"] = None  # as a kill between the record and the result leaves it
    write_object(result, data)
    assert measure_test(fit(), problem, tmp_path / "run") == {"metric": 0.5}
    assert looks == [40]
    lines = list(RunFolder.open(tmp_path / "run", lock=False).records())
    assert [line for line in lines if line["event"] == "test"] == [
        {"event": "test", "task": "tgt", "metrics": {"metric": 0.5}}
    ]


def test_without_a_test_split_there_is_nothing_to_measure() -> None:
    run = fm.SingleTask().fit(shared_problem(), model=plain_net, optimizer=ADAM, steps=2)
    assert measure_test(run, shared_problem()) is None
