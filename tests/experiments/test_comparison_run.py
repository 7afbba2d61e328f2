"""One run of a comparison: what `fit` gives, tested once, on a device of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compare_problem
import forkmerge as fm
from _asserts import assert_same_bits, bits
from compare_problem import recipe
from forkmerge.engine.executors import devices
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.experiments import comparison as comparison_module
from forkmerge.experiments import comparison_run as trial_module
from forkmerge.experiments.comparison import Comparison, plan_comparison, run_comparison
from forkmerge.experiments.run_results import RunResult, read_run_results
from problems import Stopped, counting_steps

PROBLEM = "compare_problem:recipe"


@pytest.fixture(autouse=True)
def _clean():
    compare_problem.stop_at.clear()
    compare_problem.test_reads.clear()


def planned(**options: Any) -> Comparison:
    return plan_comparison(PROBLEM, **{"methods": "ew,forkmerge", "seeds": 2, **options})


def compared(out: Path, comparison: Comparison | None = None, **options: Any) -> list[RunResult]:
    run_comparison(comparison or planned(**options), out)
    return read_run_results(out)


def by_hand(algorithm: fm.Algorithm, seed: int, target: str = "tgt", **options: Any) -> fm.Run:
    made = recipe(seed)
    settings = {"optimizer": made.optimizer, "steps": made.steps, "seed": seed, "threads": 1, **options}
    return algorithm.fit(made.problem.with_target(target), model=made.model, **settings)


def test_runs_are_what_fit_gives_and_share_their_seed(tmp_path):
    found = {(o.method, o.target, o.seed): o for o in compared(tmp_path, targets="tgt,aux")}
    algorithms = {"stl": fm.SingleTask(3), "ew": fm.Joint(interval=3), "forkmerge": fm.ForkMerge("mixed", interval=3)}
    for (method, target, seed), outcome in found.items():
        alone = by_hand(algorithms[method], seed, target)
        with RunFolder.open(tmp_path / outcome.folder, lock=False) as store:
            kept = store.model_tensors()
            assert_same_bits(bits(alone), {name: kept[name] for name in bits(alone)})
        test = recipe(seed).problem.evaluations("test")[target]
        assert outcome.metrics == fm.measure(alone.model, test, seed=seed)
        assert outcome.validation == alone.metrics


def test_killed_between_fit_and_test_it_is_tested_once(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(trial_module, "measure_test", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            compared(tmp_path, seeds=1)
    assert not compare_problem.test_reads
    found = compared(tmp_path, seeds=1)
    assert len(found) == 3
    assert len(compare_problem.test_reads) == 90


def test_every_worker_runs_on_a_device_of_its_own(tmp_path, monkeypatch):
    seen, fit = [], fm.Algorithm.fit

    def on_no_device(algorithm, problem, **options):
        seen.append(options.pop("devices"))
        return fit(algorithm, problem, **options)

    monkeypatch.setattr(fm.Algorithm, "fit", on_no_device)
    monkeypatch.setattr(devices, "own_index", lambda: 3)
    found = compared(tmp_path, methods="ew", settings={"training": {"devices": ["one", "two"]}}, seeds=1)
    assert seen == [["two"], ["two"]]
    assert not any(o.error for o in found)


def test_what_runs_have_in_common_until_their_first_merge_is_trained_once(tmp_path, monkeypatch):
    with counting_steps(monkeypatch) as together:
        compared(tmp_path / "one", targets="tgt,aux", seeds=1)
    assert not (tmp_path / "one" / ".shared").exists()
    real = comparison_module.ComparisonRun
    monkeypatch.setattr(comparison_module, "ComparisonRun", lambda *fields: real(*fields[:-1], shares=False))
    with counting_steps(monkeypatch) as apart:
        compared(tmp_path / "two", targets="tgt,aux", seeds=1)
    # The first rounds of "alone" of each target and of "joint" of both, each in two methods.
    assert apart.count("alone") - together.count("alone") == 2
    assert apart.count("joint") - together.count("joint") == 3
