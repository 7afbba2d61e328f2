"""Methods × targets × seeds: paired, sealed, resumable, and every number recoverable from the records."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import compare_problem
import forkmerge as fm
from compare_problem import recipe
from forkmerge.algorithms.equal_compute import Scaled
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.experiments import comparison_run as trial_module
from forkmerge.experiments.comparison import Comparison, plan_comparison, run_comparison
from forkmerge.experiments.events import JobStarted
from forkmerge.experiments.run_results import RunResult, read_run_results
from forkmerge.report.comparison_tables import summary_from, tables_from
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


def facts(out: Path) -> dict[str, Any]:
    """All numbers of a comparison but times."""
    data = asdict(summary_from(out))
    for cost in data["costs"].values():
        cost.update(time=None, tuning=None)
    return data


def by_hand(algorithm: fm.Algorithm, seed: int, target: str = "tgt", **options: Any) -> fm.Run:
    made = recipe(seed)
    settings = {"optimizer": made.optimizer, "steps": made.steps, "seed": seed, "threads": 1, **options}
    return algorithm.fit(made.problem.with_target(target), model=made.model, **settings)


def test_every_method_runs_on_every_target_with_every_seed(tmp_path):
    found = compared(tmp_path, targets="all")
    keys = {(o.method, o.target, o.seed) for o in found}
    assert keys == {(m, t, s) for m in ("stl", "ew", "forkmerge") for t in ("tgt", "aux") for s in (0, 1)}
    assert not any(outcome.error for outcome in found)
    assert {outcome.split for outcome in found} == {"test"}
    assert {o.branches for o in found if o.method == "forkmerge"} == {2}


def test_the_test_split_is_read_once_per_run_and_never_again(tmp_path):
    found = compared(tmp_path, tune={"lr": [0.1, 0.3]}, seeds=1)
    finals = [outcome for outcome in found if outcome.kind == "final"]
    assert len(found) > len(finals) == 3
    assert len(compare_problem.test_reads) == 30 * len(finals)
    compared(tmp_path, tune={"lr": [0.1, 0.3]}, seeds=1)
    assert len(compare_problem.test_reads) == 30 * len(finals)


def test_what_is_done_is_skipped(tmp_path, monkeypatch):
    compared(tmp_path)
    with counting_steps(monkeypatch) as trained:
        compared(tmp_path)
        assert not trained
        compared(tmp_path, methods="ew", seeds=3)
    assert trained
    assert len(read_run_results(tmp_path)) == 3 * 2 + 2  # the new seed's stl and ew
    assert summary_from(tmp_path).seeds == [0, 1, 2]


@pytest.mark.parametrize("stops", [[(0, 0)], [(0, 4)], [(1, 1), (1, 5)], [(0, 2), (0, 3), (1, 2)]])
def test_interrupted_anywhere_it_ends_with_the_same_numbers(tmp_path, stops):
    options = {"methods": "posttrain,forkmerge-aux", "tune": {"interval": [2, 3]}, "seeds": 2}
    compared(tmp_path / "whole", **options)
    compare_problem.stop_at.extend(stops)
    for _ in stops:
        with pytest.raises(Stopped):
            compared(tmp_path / "cut", **options)
    compared(tmp_path / "cut", **options)
    assert facts(tmp_path / "cut") == facts(tmp_path / "whole")


def test_a_run_that_fails_is_recorded_and_does_not_stop_the_rest(tmp_path):
    found = compared(tmp_path, settings={"arguments": {"broken": 1}})
    failed = {(o.method, o.seed): o.error for o in found if o.error}
    assert failed == {
        ("ew", 1): "RuntimeError: the odd task broke",
        ("forkmerge", 1): "RuntimeError: the odd task broke",
    }
    assert all("shared_losses" in o.details or "losses" in o.details for o in found if o.error)
    summary = summary_from(tmp_path)
    assert "EW on 'tgt', seed 1: RuntimeError: the odd task broke" in summary.failures
    standing = next(s for s in summary.overall if s.method == "ew")
    assert standing.change.count == 1
    assert any("failed: EW on 'tgt', seed 1" in note for note in tables_from(tmp_path)[-1].notes)


def test_what_failed_is_tried_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(trial_module, "measure_test", lambda *_: 1 / 0)
        assert all(o.error.startswith("ZeroDivisionError") for o in compared(tmp_path))
    assert not any(o.error for o in compared(tmp_path))


def test_tuning_chooses_on_validation_at_the_first_seeds(tmp_path):
    rates = [0.001, 0.3]
    found = compared(tmp_path, tune={"lr": rates}, tune_seeds=2, seeds=3)
    tried = {(o.method, o.setting["lr"], o.seed) for o in found if o.kind == "tuning"}
    assert tried == {(m, lr, s) for m in ("stl", "ew", "forkmerge") for lr in rates for s in (0, 1)}
    for outcome in found:
        if outcome.kind == "final":
            assert outcome.setting == {"lr": 0.3}  # 0.001 hardly moves
    alone = by_hand(fm.SingleTask(3), 2, optimizer=Scaled(recipe().optimizer, lr=0.3))
    last = next(o for o in found if (o.method, o.seed, o.kind) == ("stl", 2, "final"))
    assert last.validation == alone.metrics
    summary = summary_from(tmp_path)
    assert summary.settings["tgt"]["STL"] == {"lr": 0.3}
    assert summary.costs["stl"].tuning > 2  # two rates with two seeds each, in units of one run


def test_only_options_that_mean_something_are_tuned(tmp_path):
    found = compared(tmp_path, methods="forkmerge,posttrain", seeds=1, tune={"interval": [2, 3], "pretrain_steps": [2]})
    settings = {o.method: o.setting for o in found if o.kind == "final"}
    assert settings["stl"] == {}
    assert settings["posttrain"] == {"pretrain_steps": 2}
    assert set(settings["forkmerge"]) == {"interval"}
    assert {o.method for o in found if o.kind == "tuning"} == {"forkmerge"}


def test_a_method_whose_tuning_failed_is_recorded(tmp_path):
    options = {"settings": {"arguments": {"broken": 0}}, "tune": {"lr": [0.1, 0.3]}, "methods": "ew", "seeds": 1}
    found = compared(tmp_path, **options)
    final = next(o for o in found if (o.method, o.kind) == ("ew", "final"))
    assert final.error == "every run that tuning tried has failed"
    assert not any(o.error for o in found if o.method == "stl")


def test_equal_labels_refits_everything_and_tunes_without(tmp_path):
    options = {"methods": "ew,posttrain,forkmerge", "seeds": 1, "equal_labels": True, "tune": {"lr": [0.1, 0.3]}}
    found = compared(tmp_path, **options)
    for outcome in found:
        with RunFolder.open(tmp_path / outcome.folder, lock=False) as store:
            assert store.config["algorithm"]["refit"] is (outcome.kind == "final")
    stl = next(o for o in found if (o.method, o.kind) == ("stl", "final"))
    optimizer = Scaled(recipe().optimizer, lr=stl.setting["lr"])
    alone = by_hand(fm.SingleTask(3, refit=True), 0, optimizer=optimizer)
    assert stl.metrics == fm.measure(alone.model, recipe().problem.evaluations("test")["tgt"])
    assert any("training ∪ validation" in note for note in tables_from(tmp_path)[-1].notes)


def test_equal_compute_adds_what_the_same_compute_buys(tmp_path):
    comparison = planned(methods="forkmerge-aux", equal_compute=True, seeds=1)
    words = [
        *("stl", "forkmerge-aux", "forkmerge-aux-uniform", "forkmerge-aux-once", "stl-best:3", "posttrain-best:3"),
        *("stl-average:3", "posttrain-average:3", "joint-then-alone-average:3"),
    ]
    assert [method.word for method in comparison.methods] == words
    found = compared(tmp_path, comparison)
    assert {o.branches for o in found if o.method not in ("stl",)} == {3}
    assert not any(o.error for o in found)


def test_pruned_branches_are_not_counted_among_those_left(tmp_path):
    found = compared(tmp_path, planned(methods="forkmerge-aux[prune_to=2],forkmerge-aux", seeds=1))
    left = {o.method: (o.branches, o.branches_left) for o in found}
    assert left.pop("forkmerge-aux[prune_to=2]")[0] == 3
    assert {o.branches_left for o in found if "prune" in o.method} <= {1, 2}
    assert left == {"stl": (1, 1), "forkmerge-aux": (3, 3)}


def test_processes_change_nothing_but_time(tmp_path):
    comparison = planned(targets="all", settings={"arguments": {"broken": 1}})
    run_comparison(comparison, tmp_path / "here", workers=1)
    run_comparison(comparison, tmp_path / "there", workers=2)
    assert facts(tmp_path / "here") == facts(tmp_path / "there")


def test_a_cluster_changes_nothing_but_where_runs_are(on_ray, tmp_path):
    compared(tmp_path / "one")
    run_comparison(planned(), tmp_path / "other", executor=on_ray)
    assert facts(tmp_path / "other") == facts(tmp_path / "one")
    assert not list((tmp_path / "other").glob(".seen*"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says and does all this")
def test_a_folder_that_workers_do_not_see_is_refused_before_training(on_ray, tmp_path):
    events, folder = [], os.open(tmp_path, os.O_RDONLY)
    own = Path(f"/proc/self/fd/{folder}/runs")  # something else in every process
    with pytest.raises(
        fm.ProblemError, match=rf"a worker on \S+ does not see {own}, .* on storage that all nodes share"
    ):
        run_comparison(planned(), own, executor=on_ray, on_event=events.append)
    os.close(folder)
    assert not any(isinstance(event, JobStarted) for event in events)
    assert not read_run_results(tmp_path / "runs")


def test_devices_change_nothing_but_where_runs_are(tmp_path):
    run_comparison(planned(), tmp_path / "here")
    run_comparison(planned(settings={"training": {"devices": ["cpu", "cpu"]}}), tmp_path / "there", workers=2)
    here, there = (facts(tmp_path / name) for name in ("here", "there"))
    assert here == there
    assert all(cost["memory"] is not None for cost in there["costs"].values())


def test_other_settings_in_one_folder_are_refused(tmp_path):
    compared(tmp_path, seeds=1)
    with pytest.raises(fm.StoreError, match=r"settings was .* and is .*'steps': 7.* now"):
        compared(tmp_path, seeds=1, settings={"steps": 7})
    with pytest.raises(fm.StoreError, match=r"equal_labels was False and is True now"):
        compared(tmp_path, seeds=1, equal_labels=True)


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(fm.StoreError, match="holds something else"):
        compared(tmp_path)
    with pytest.raises(fm.StoreError, match="is not the folder of a comparison"):
        tables_from(tmp_path)


def test_a_comparison_that_is_running_is_left_alone(tmp_path):
    seen = []

    def watch(event):
        if isinstance(event, JobStarted) and not seen:
            seen.append(event)
            with pytest.raises(fm.StoreError, match="already running in another process"):
                compared(tmp_path, seeds=1)

    run_comparison(planned(seeds=1), tmp_path, on_event=watch)
    assert seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "ax"}, "unknown task with validation data 'ax'. Did you mean 'aux'"),
        ({"targets": "odd"}, "unknown task with validation data 'odd'"),
        ({"targets": ","}, "names no task"),
        ({"seeds": 0}, "at least one seed"),
        ({"seeds": 2, "tune_seeds": 3}, "tune_seeds must be from 1 to the number of seeds, 2"),
        ({"tune": {"wings": [1, 2]}}, "no method of this comparison has an option of that name"),
        ({"tune": {"lr": []}}, "has no values"),
        ({"tune": {"interval": [0]}}, "interval must be a positive integer"),
        ({"methods": "posttrain", "settings": {"steps": 1}}, "pretrain_steps must leave both parts"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(options, message):
    with pytest.raises(fm.ForkMergeError) as error:
        planned(**options)
    assert message in str(error.value)


def test_a_problem_without_auxiliaries_is_refused():
    with pytest.raises(fm.ConfigError, match="there is nothing to compare"):
        plan_comparison("compare_problem:alone")
