"""What the folders of runs say: finished, interrupted or unreadable, without the code that made them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from forkmerge.algorithms.saved_run import SavedRun, list_saved_runs, read_run, read_saved_run
from problems import Stopped, fit, stop_at


def interrupted(folder: Path, events: int = 8, **options: Any) -> Path:
    """A run of two rounds that was killed at an event."""
    with pytest.raises(Stopped):
        fit(fm.ForkMerge("mixed", interval=6, refit=True), folder=folder, on_event=stop_at(events), **options)
    return folder


def test_a_finished_run_is_read_as_it_ended(tmp_path: Path) -> None:
    run = fit(fm.ForkMerge("mixed", interval=6), folder=tmp_path / "run")
    saved = read_saved_run(tmp_path / "run")
    assert read_run(tmp_path / "run") == saved.run == run
    assert saved.rounds == run.rounds
    assert (saved.status, saved.algorithm, saved.target, saved.steps, saved.step) == (
        "finished",
        "ForkMerge",
        "tgt",
        12,
        12,
    )
    row = saved.to_row()
    assert (row["progress"], row["score"], row["metrics"], row["test"]) == ("12", run.score, run.metrics, "")


def test_an_interrupted_run_says_how_far_it_got_and_where_it_goes_on(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run")
    saved = read_saved_run(folder, verify=True)
    assert (saved.status, saved.phase, saved.step, saved.run) == ("interrupted", "search", 12, None)
    assert [r.end for r in saved.rounds] == [6]
    assert saved.checkpoint == "step 6"
    assert saved.to_row()["progress"] == "12/12"
    assert saved.to_row()["score"] == saved.rounds[0].score
    with pytest.raises(fm.StoreError, match=r"run is not finished: continue it with"):
        read_run(folder)


def test_in_a_refit_the_step_is_that_of_the_refit(tmp_path: Path) -> None:
    saved = read_saved_run(interrupted(tmp_path / "run", 13), verify=True)
    assert (saved.phase, saved.step, saved.to_row()["progress"]) == ("refit", 6, "6/12 refit")


def test_how_to_resume_depends_on_who_started_it(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "a run")
    assert read_saved_run(folder).how_to_resume == (
        f"fit(…, folder={str(folder)!r}, resume=True) in the program that started it"
    )
    other = interrupted(tmp_path / "another run", source={"recipe": "somewhere:recipe"})
    assert read_saved_run(other).how_to_resume.endswith(f"resume '{other}'")


def test_a_list_has_a_row_per_run_and_hides_neither_parts_nor_damage(tmp_path: Path) -> None:
    fit(fm.PostTrain(), folder=tmp_path / "composed")
    interrupted(tmp_path / "group" / "cut")
    (tmp_path / "broken").mkdir()
    for name in ("config.json", "record.jsonl"):
        (tmp_path / "broken" / name).write_text("{")
    rows = {row["name"]: row for row in list_saved_runs(tmp_path)}
    assert {name: row["status"] for name, row in rows.items()} == {
        "broken": "unreadable",
        "composed": "finished",
        os.path.join("group", "cut"): "interrupted",
    }
    assert rows["broken"]["changed"], "the reason"
    assert {row["name"] for row in list_saved_runs(tmp_path / "composed")} == {"composed", "pretraining", "finetuning"}


def test_a_damaged_record_is_an_error_only_where_nothing_else_says_it(tmp_path: Path) -> None:
    run = fit(fm.ForkMerge("mixed", interval=6, refit=True), folder=tmp_path / "run")
    whole = read_saved_run(tmp_path / "run")
    folders = tmp_path / "run", interrupted(tmp_path / "cut")
    for folder in folders:
        record = folder / "record.jsonl"
        record.write_bytes(record.read_bytes().replace(b"segment", b"sogment", 1))
    saved = read_saved_run(folders[0])
    assert saved.warnings == [f"line 2 of {folders[0]}/record.jsonl is damaged: it does not match its own checksum."]
    assert (saved.run, saved.rounds, saved.to_row()) == (run, whole.rounds, {**whole.to_row(), **changed(saved)})
    with pytest.raises(fm.StoreError, match=r"line 2 of .*cut/record\.jsonl is damaged"):
        read_saved_run(folders[1])
    assert len(read_saved_run(folders[1], needs_record=False).warnings) == 1


def changed(saved: SavedRun) -> dict[str, Any]:
    return {"changed": saved.to_row()["changed"]}


def test_an_event_of_another_form_is_named_with_its_line(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run")
    for event, said in (({"event": 3}, "3 is no text"), ({}, "missing 1 required"), ({"event": "round"}, "missing 10")):
        (folder / "record.jsonl").write_text(json.dumps({"event": "start"}) + "\n" + json.dumps(event) + "\n")
        with pytest.raises(fm.StoreError, match=rf"line 2 of .*record\.jsonl is not a \w+: .*{said}"):
            read_saved_run(folder)


def test_an_interrupted_run_of_branches_at_several_rates_says_where_it_continues(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        fit(fm.ForkMerge("rates", interval=4), folder=tmp_path / "run", on_event=stop_at(12))
    assert read_saved_run(tmp_path / "run", verify=True).checkpoint == "step 4"
