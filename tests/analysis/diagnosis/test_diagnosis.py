"""A diagnosis: what a resume does not do again, and what becomes of what fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import forkmerge as fm
from compare_problem import test_reads
from forkmerge.algorithms.events import Notice
from forkmerge.analysis import advice
from forkmerge.analysis.diagnosis import budget, diagnosis, pieces
from forkmerge.analysis.results import Pictures
from forkmerge.analysis.transfer_runs import SeededSource
from forkmerge.cli.commands import app
from forkmerge.errors import ConfigError, ProblemError, StoreError
from forkmerge.report.table import to_markdown
from forkmerge.report.verdict_table import verdict_table

SMALL = budget.DiagnosisPlan(2, (0.5, 1.0), 4, 6, 1, 2, 2, advice.ProbeSettings(2, 1), 1, 1.0)


WHOLE = replace(SMALL, seeds=1, weights=(1.0,), steps=6, one_step=0, pictures=4)


def planned(monkeypatch, plan=SMALL):
    monkeypatch.setattr(
        diagnosis, "time_pieces", lambda recipes: budget.PieceTimes(0.01, {"aux": 0.01, "odd": 0.01}, 0.1, 0)
    )
    monkeypatch.setattr(diagnosis, "plan_budget", lambda *arguments: plan)


def test_a_metric_that_is_not_a_number_does_not_end_a_diagnosis(tmp_path, monkeypatch):
    planned(monkeypatch, replace(SMALL, steps=6))

    def spoiled(piece, tell):
        found = pieces.do(piece)
        if piece.kind == "transfer" and piece.seed == 1 and piece.auxiliary == "odd":
            return {**found, "metrics": {"validation": dict.fromkeys(found["metrics"]["validation"])}}
        return found

    monkeypatch.setattr(diagnosis, "do", spoiled)
    found = diagnosis.diagnose(fm.load_recipe("compare_problem:recipe"), tmp_path / "d", budget=1)
    assert [finding.advice for finding in found.findings][1] == "drop"
    assert "diverged" in found.findings[1].reason
    table = verdict_table(diagnosis.read_diagnosis(tmp_path / "d"))
    assert [cell.text for cell in table.rows[1]].count("diverged") == 2


def test_a_diagnosis_does_every_piece_once_and_reads_no_test_split(tmp_path, monkeypatch):
    planned(monkeypatch)
    loaded, out = fm.load_recipe("compare_problem:recipe"), tmp_path / "d"
    test_reads.clear()
    events = []
    found = diagnosis.diagnose(loaded, out, budget=1, on_event=events.append)
    assert not test_reads
    assert [finding.auxiliary for finding in found.findings] == ["aux", "odd"]
    assert all(len(finding.curve.points) == 2 for finding in found.findings)
    assert all(finding.similarity is not None and finding.shift is not None for finding in found.findings)
    assert {gains.auxiliary for gains in found.one_step} == {"aux", "odd", "l2"}
    assert diagnosis.read_diagnosis(out) == found
    done = []
    monkeypatch.setattr(diagnosis, "do", lambda piece, tell: done.append(piece))
    again = diagnosis.diagnose(loaded, out, budget=1)
    assert not done
    assert again == found
    assert found.seconds > 0
    assert found.settings == {"recipe": "compare_problem:recipe"}
    assert {"python", "torch", "threads"} <= set(found.environment)
    assert "down-weight" in to_markdown([verdict_table(found)]) or found.findings[0].advice != "down-weight"


def test_a_cluster_changes_nothing_but_where_its_pieces_are_done(on_ray, tmp_path, monkeypatch):
    planned(monkeypatch, replace(WHOLE, one_step=1, pictures=0))
    loaded = fm.load_recipe("compare_problem:recipe")
    here = diagnosis.diagnose(loaded, tmp_path / "here", budget=1)
    there = diagnosis.diagnose(loaded, tmp_path / "there", budget=1, executor=on_ray)
    assert len(list(tmp_path.glob("there/pieces/*.json"))) >= 5
    assert replace(there, seconds=0) == replace(here, seconds=0)


def source(name="apart"):
    return SeededSource(dict(fm.load_recipe(f"compare_problem:{name}").source), "tgt")


def pictured(name="apart"):
    return Pictures.from_json(pieces.do(pieces.Piece(source(name), WHOLE, "tgt", "pictures")))


def test_a_diagnosis_keeps_its_pictures_and_does_not_make_them_again(tmp_path, monkeypatch):
    planned(monkeypatch, WHOLE)
    loaded, out = fm.load_recipe("compare_problem:recipe"), tmp_path / "d"
    found = diagnosis.diagnose(loaded, out, budget=1)
    assert found.pictures == pictured("recipe")
    assert set(found.pictures.notes) < set(found.notes)
    assert diagnosis.read_diagnosis(out) == found
    done = []
    monkeypatch.setattr(diagnosis, "do", lambda piece, tell: done.append(piece.kind) or pieces.do(piece))
    min(out.glob("pieces/probe*")).unlink()
    assert diagnosis.diagnose(loaded, out, budget=1).pictures == found.pictures
    assert done == ["probe"]


def test_a_killed_diagnosis_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    planned(monkeypatch)
    loaded, done = fm.load_recipe("compare_problem:recipe"), []

    def dying(piece, tell):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(piece.key)
        return pieces.do(piece)

    monkeypatch.setattr(diagnosis, "do", dying)
    with pytest.raises(KeyboardInterrupt):
        diagnosis.diagnose(loaded, tmp_path / "d", budget=1)
    first = list(done)
    monkeypatch.setattr(diagnosis, "do", lambda piece, tell: done.append(piece.key) or pieces.do(piece))
    found = diagnosis.diagnose(loaded, tmp_path / "d", budget=1)
    assert (
        len(done)
        == len(set(done))
        == len(budget.piece_seconds(SMALL, budget.PieceTimes(1, {"aux": 1, "odd": 1}, 1, 1)))
    )
    assert done[:4] == first
    monkeypatch.setattr(diagnosis, "do", pieces.do)
    whole = diagnosis.diagnose(loaded, tmp_path / "e", budget=1)
    assert whole.findings == found.findings


def test_a_larger_budget_extends_the_plan_and_keeps_what_still_fits(tmp_path, monkeypatch):
    plans = {1: SMALL, 2: replace(SMALL, seeds=3), 3: replace(SMALL, seeds=3, steps=6)}
    planned(monkeypatch)
    monkeypatch.setattr(diagnosis, "plan_budget", lambda costs, probe, steps, budget, workers: plans[budget])
    loaded, out, done, said = fm.load_recipe("compare_problem:recipe"), tmp_path / "d", [], []
    first = diagnosis.diagnose(loaded, out, budget=1)
    monkeypatch.setattr(diagnosis, "do", lambda piece, tell: done.append(piece.key) or pieces.do(piece))
    longer = diagnosis.diagnose(loaded, out, budget=2, say=said.append)
    assert said[0].endswith("the larger budget extends its plan")
    assert {key[0] for key in done} == {"single task", "transfer", "probe"}
    assert {key[3] for key in done} == {2}
    assert longer.seconds > first.seconds
    assert len(longer.findings[0].curve.seeds) == 3
    done.clear()
    assert diagnosis.diagnose(loaded, out, budget=1) == longer  # less than before changes nothing
    assert not done
    whole = diagnosis.diagnose(loaded, out, budget=3)
    assert {key[0] for key in done} == {"single task", "transfer", "ForkMerge", "gradients"}  # trials are as before
    assert diagnosis.read_diagnosis(out).plan["steps"] == whole.plan["steps"] == 6


def test_a_changed_recipe_is_noticed(tmp_path, monkeypatch):
    planned(monkeypatch)
    loaded, events = fm.load_recipe("compare_problem:recipe"), []
    diagnosis.diagnose(loaded, tmp_path / "d", budget=1)
    changed = replace(loaded, source={**loaded.source, "code": "other"})
    diagnosis.diagnose(changed, tmp_path / "d", budget=1, on_event=events.append)
    (warning,) = [event.text for event in events if isinstance(event, Notice) and event.is_warning]
    assert warning == f"the code of the recipe has changed since {tmp_path / 'd'} was started"


def test_what_verdicts_can_do_without_may_fail(tmp_path, monkeypatch):
    planned(monkeypatch, WHOLE)

    def failing(piece, tell):
        if piece.kind in ("gradients", "pictures"):
            raise RuntimeError("no screen")
        return pieces.do(piece)

    loaded, out = fm.load_recipe("compare_problem:recipe"), tmp_path / "d"
    monkeypatch.setattr(diagnosis, "do", failing)
    found = diagnosis.diagnose(loaded, out, budget=1)
    for kind in ("gradients", "pictures"):
        assert f"No {kind}: RuntimeError: no screen. The same command tries again." in found.notes
    assert found.findings[0].similarity is None
    monkeypatch.setattr(diagnosis, "do", pieces.do)
    again = diagnosis.diagnose(loaded, out, budget=1)
    assert not any("tries again" in note for note in again.notes)
    assert again.findings[0].similarity is not None


def test_a_failed_piece_is_named_and_the_others_are_kept(tmp_path, monkeypatch):
    planned(monkeypatch)
    loaded = fm.load_recipe("compare_problem:recipe", {"arguments": {"broken": 1}})
    with pytest.raises(ProblemError, match=r"odd λ=.*seed 1: .*the odd task broke"):
        diagnosis.diagnose(loaded, tmp_path / "d", budget=1)
    assert len(list((tmp_path / "d" / "pieces").glob("*.json"))) > 8


def test_a_folder_of_something_else_is_refused(tmp_path, monkeypatch):
    planned(monkeypatch)
    (tmp_path / "notes.txt").write_text("mine")
    loaded = fm.load_recipe("compare_problem:recipe")
    with pytest.raises(StoreError, match="holds something else"):
        diagnosis.diagnose(loaded, tmp_path, budget=1)
    diagnosis.diagnose(loaded, tmp_path / "d", budget=1)
    with pytest.raises(StoreError, match="diagnoses something else"):
        diagnosis.diagnose(fm.load_recipe("compare_problem:recipe", {"steps": 5}), tmp_path / "d", budget=1)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("pieces/*.json", "is not a piece of a diagnosis: it lacks 'result'"),
        ("diagnosis_plan.json", "is not a diagnosis: it lacks 'about', 'costs', 'plan'"),
        ("diagnosis.json", "is not a diagnosis: it lacks 'diagnosis'"),
    ],
)
def test_a_file_that_lacks_its_content_is_refused_by_name(tmp_path, monkeypatch, file, said):
    planned(monkeypatch)
    loaded, out = fm.load_recipe("compare_problem:recipe"), tmp_path / "d"
    diagnosis.diagnose(loaded, out, budget=1)
    damaged = min(out.glob(file))
    damaged.write_text('{"format": 1}')
    with pytest.raises(StoreError, match=rf"{damaged.name} {said}"):
        diagnosis.read_diagnosis(out) if file == "diagnosis.json" else diagnosis.diagnose(loaded, out, budget=1)


def test_a_problem_of_one_task_has_nothing_to_diagnose(tmp_path):
    with pytest.raises(ConfigError, match="one task only"):
        diagnosis.diagnose(fm.load_recipe("compare_problem:alone"), tmp_path / "d", budget=1)


def test_the_command_prints_json_alone_or_a_table(tmp_path, monkeypatch):
    planned(monkeypatch)
    words = ["diagnose", "compare_problem:recipe", "--workers", "1", "--out", str(tmp_path / "d")]
    result = CliRunner().invoke(app, [*words, "--json"])
    data = json.loads(result.stdout)
    assert data["target"] == "tgt"
    assert data["folder"] == str(tmp_path / "d")
    shown = CliRunner().invoke(app, words)
    assert "What every auxiliary does to tgt" in shown.stdout
    assert "diagnosis.json" in shown.stdout
