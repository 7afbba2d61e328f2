"""Algorithms made of whole runs: their parts have folders of their own, and end, resume and are told as one run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import forkmerge as fm
from _asserts import assert_same_bits, bits
from forkmerge.algorithms.composed import Parts, comparable_scores, follow, whole
from forkmerge.algorithms.saved_run import read_run
from forkmerge.engine.storage.run_folder import NoStore, RunFolder
from problems import SGD, counting_steps, fit, plain_net, shared_problem


def test_a_finished_run_is_returned_without_training(tmp_path, monkeypatch):
    algorithm = fm.PostTrain()
    first = fit(algorithm, folder=tmp_path / "run")
    with counting_steps(monkeypatch) as trained:
        again = fit(algorithm, folder=tmp_path / "run", resume=True)
    assert not trained
    assert_same_bits(first, again)
    assert first.to_json() == again.to_json()
    assert read_run(tmp_path / "run") == again


def test_a_folder_of_which_only_the_lock_was_written_is_started(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()
    run = fit(fm.PostTrain(), folder=tmp_path / "run", resume=True)
    assert_same_bits(run, fit(fm.PostTrain()))


def test_resuming_with_other_options_is_refused(tmp_path):
    fit(fm.PostTrain(), folder=tmp_path / "run")
    with pytest.raises(fm.StoreError, match=r"algorithm.pretrain_steps was None and is 3 now"):
        fit(fm.PostTrain(pretrain_steps=3), folder=tmp_path / "run", resume=True)


def test_the_folder_holds_both_parts_and_what_became_of_them(tmp_path):
    run = fit(fm.PostTrain(), folder=tmp_path / "run")
    assert {path.parent.name for path in (tmp_path / "run").glob("*/result.json")} == {"pretraining", "finetuning"}
    with RunFolder.open(tmp_path / "run", lock=False) as store:
        assert [event["event"] for event in store.records()] == ["start", "part", "part", "end"]
        assert_same_bits(dict(store.model_tensors()), {k: bits(run)[k] for k in store.model_tensors()})


def test_rounds_of_a_second_part_go_on_counting() -> None:
    first, second = (fit(fm.SingleTask(interval=3), steps=steps).rounds for steps in (5, 4))
    joined = follow(first, second, 5)
    assert [(r.index, r.start, r.end) for r in joined] == [(1, 0, 3), (2, 3, 5), (3, 5, 8), (4, 8, 9)]
    assert [r.branches["alone"].entered_step for r in joined] == [3, 5, 8, 9]
    assert [r.end for r in second] == [3, 4], "the rounds given are left alone"


def test_a_whole_has_the_time_and_the_notes_of_its_parts_each_note_once() -> None:
    model, run = plain_net(), fit(fm.SingleTask(), steps=1)
    parts = Parts(shared_problem(), model, model, SGD, 7, 3, 1, 1, {}, print, None, NoStore())
    for name, notes in {"a": ["both", "one"], "b": ["both"]}.items():
        parts.finish(name, replace(run, notes=notes, seconds={"train": 2.0, name: 1.0}))
    combined = whole(fm.PostTrain(), parts, run, final="last step")
    assert (combined.algorithm, combined.steps, combined.seed, combined.final) == ("PostTrain", 7, 3, "last step")
    assert combined.seconds == {"train": 4.0, "a": 1.0, "b": 1.0}
    assert combined.notes == ["2 parts: both", "a: one"]
    assert combined.model is model


class TestComparableScores:
    def test_one_metric_is_its_own_score(self) -> None:
        assert comparable_scores({"loss": -1}, [{"loss": 2.0}, {"loss": 3.0}]) == [-2.0, -3.0]

    def test_several_are_all_compared_with_the_same_run(self) -> None:
        metrics = [{"a": 1.0, "b": 4.0}, {"a": 2.0, "b": 4.0}]
        assert comparable_scores({"a": 1, "b": -1}, metrics) == pytest.approx([0.0, 0.5])
        assert comparable_scores({"a": 1, "b": -1}, metrics, reference=1) == pytest.approx([-0.25, 0.0])

    def test_a_run_that_cannot_be_compared_with_is_passed_over(self) -> None:
        metrics = [{"a": 0.0, "b": 4.0}, {"a": math.nan, "b": 4.0}, {"a": 2.0, "b": 4.0}]
        assert comparable_scores({"a": 1, "b": 1}, metrics) == [pytest.approx(-0.5), -math.inf, 0.0]
