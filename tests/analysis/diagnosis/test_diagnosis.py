"""A diagnosis: what fits into a budget, what a resume does not do again, and what is advised."""

from __future__ import annotations

import builtins
import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import forkmerge as fm
from compare_problem import recipe, test_reads
from forkmerge.analysis import advice
from forkmerge.analysis.diagnosis import budget, diagnosis, pieces
from forkmerge.analysis.results import AuxiliaryFinding, Diagnosis, Pictures
from forkmerge.analysis.transfer import transfer_curve
from forkmerge.analysis.transfer_runs import SeededSource, TransferRun, do_transfer_run
from forkmerge.cli.commands import app
from forkmerge.errors import ConfigError, ProblemError, StoreError
from forkmerge.problem.metrics import Criterion
from forkmerge.report.table import to_markdown
from forkmerge.report.verdict_table import verdict_table

COSTS = budget.PieceTimes(alone=0.01, pairs={"a": 0.02, "b": 0.02}, fixed=0.5, loading=1.0)
PROBE = advice.ProbeSettings(100, 50)
SMALL = budget.DiagnosisPlan(2, (0.5, 1.0), 4, 6, 1, 2, 2, advice.ProbeSettings(2, 1), 1, 1.0)


GOOD, BAD = (0.09, 0.1, 0.11), (-0.09, -0.1, -0.11)


def curve(*gains, weight=1.0):
    seeds = range(len(gains))
    return transfer_curve(
        {weight: dict(zip(seeds, gains, strict=True))}, dict.fromkeys(seeds, 0.0), target="t", auxiliary="a"
    )


WHOLE = replace(SMALL, seeds=1, weights=(1.0,), steps=6, one_step=0, pictures=4)


def planned(monkeypatch, plan=SMALL):
    monkeypatch.setattr(
        diagnosis, "time_pieces", lambda recipes: budget.PieceTimes(0.01, {"aux": 0.01, "odd": 0.01}, 0.1, 0)
    )
    monkeypatch.setattr(diagnosis, "plan_budget", lambda *arguments: plan)


def test_a_probe_costs_at_most_its_share():
    problem = recipe().problem  # one stream for all tasks: a pair costs as much as the target alone
    for share in (0.05, 0.1, 0.2):
        plan = advice.probe_settings(problem, 1000, share)
        assert 0.9 * share <= advice.compute_share(problem, plan, 1000) <= share


def test_a_probe_compares_branches_of_one_trunk_on_the_same_batches():
    r = recipe(0)
    trials = advice.probe(r, advice.ProbeSettings(3, 2), seed=0)
    assert [trial.auxiliary for trial in trials] == ["aux", "odd"]
    (same,) = [t.effect for t in advice.probe(r, advice.ProbeSettings(3, 2), seed=0) if t.auxiliary == "aux"]
    assert same == trials[0].effect
    harmless = advice.probe(r, advice.ProbeSettings(3, 2, (1e-12,)), seed=0)
    assert all(abs(trial.effect) < 1e-6 for trial in harmless)


def test_affinity_is_the_mean_over_seeds_and_a_diverged_trial_is_as_bad_as_can_be():
    trials = [advice.ShortRun("a", 1.0, seed, value) for seed, value in enumerate((0.1, 0.2, 0.3))]
    assert advice.affinity(trials, "a").mean == pytest.approx(0.2)
    assert advice.affinity([*trials, advice.ShortRun("a", 1.0, 3, math.nan)], "a").is_negative


@pytest.mark.parametrize(
    ("gains", "effects", "advised"),
    [
        ((0.09, 0.1, 0.11), (-0.5, -0.5), "use"),
        ((-0.09, -0.1, -0.11), (0.5, 0.5), "drop"),
        ((-0.5, 0.0, 0.6), (0.5, 0.51), "use"),
        ((-0.6, 0.0, 0.5), (-0.5, -0.51), "down-weight"),
        ((-0.6, 0.0, 0.5), (0.5, 0.51), "undecided"),
        ((-0.1, 1e-16, 0.1), (-0.1, 0.2), "undecided"),
    ],
)
def test_advice_follows_full_training_and_else_what_both_estimates_agree_on(gains, effects, advised):
    trials = [advice.ShortRun("a", 1.0, seed, value) for seed, value in enumerate(effects)]
    found, reason = advice.advise(curve(*gains), advice.affinity(trials, "a"))
    assert found == advised
    assert reason


def curve_over(gains):
    scores = {weight: dict(enumerate(values)) for weight, values in gains.items()}
    return transfer_curve(scores, dict.fromkeys(range(3), 0.0), target="t", auxiliary="a")


@pytest.mark.parametrize(
    ("gains", "advised", "reason"),
    [
        ({0.25: BAD, 1.0: BAD}, "drop", "it hurts at every λ that was tried"),
        ({0.25: GOOD, 1.0: BAD}, "down-weight", "it hurts at λ = 1, and the mean gain at λ = 0.25 is positive"),
        ({0.25: BAD, 1.0: GOOD}, "use", "it helps at λ = 1"),
        ({0.25: BAD, 1.0: (-0.5, 0.1, 0.5)}, "undecided", "the runs show no clear effect"),
        ({0.25: GOOD, 1.0: (-0.5, 0.0, 0.4)}, "down-weight", "helps at a smaller λ than 1, and no gain shows at λ = 1"),
        ({0.25: GOOD, 1.0: (-0.4, 0.0, 0.5)}, "use", "helps at a smaller λ than 1, and leans towards"),
        ({0.25: BAD, 1.0: (-0.5, 0.0, 0.4)}, "drop", "it hurts at some λ, and no λ that was tried has a positive"),
        ({1.0: BAD}, "drop", "it hurts at λ = 1, and no λ that was tried has a positive mean gain"),
        ({0.25: GOOD, 1.0: (0.1, math.nan, 0.1)}, "down-weight", "training with it diverged at λ = 1, and the mean"),
    ],
)
def test_advice_says_of_the_plain_sum_only_what_its_own_gains_show(gains, advised, reason):
    found, why = advice.advise(curve_over(gains), None)
    assert found == advised
    assert reason in why


def test_shortened_runs_leave_the_advice_to_the_probe():
    bad = curve_over({0.25: BAD, 1.0: BAD})
    assert advice.advise(bad, None, is_whole=False)[0] == "undecided"
    better, worse = (advice.Affinity("a", m, m - 0.1, m + 0.1) for m in (0.2, -0.2))
    assert advice.advise(bad, better, is_whole=False)[0] == "use"
    assert advice.advise(bad, worse, is_whole=False)[0] == "down-weight"
    leaning = advice.advise(bad, replace(worse, high=0.1), is_whole=False)
    assert leaning == ("down-weight", "short trials lean against it, though not beyond doubt")
    slight = advice.Affinity("a", -0.01, -0.1, 0.1)
    assert advice.advise(bad, slight, is_whole=False)[0] == "undecided"
    assert advice.advise(curve_over({1.0: GOOD}), replace(better, low=-0.1), is_whole=False)[0] == "use"


def test_a_score_is_judged_relative_to_itself_and_without_the_tolerance_of_losses(monkeypatch):
    monkeypatch.setattr(advice, "reads_heldout", lambda *rest: False)
    one = recipe(0).problem.with_target("aux")
    scores = iter([-2.0, -2.0, -2.5, -2.4, -1.0, -1.0])
    monkeypatch.setattr(advice, "measure", lambda *rest, **options: {"loss": -next(scores)})
    trials = advice.probe(replace(recipe(0), problem=one), advice.ProbeSettings(3, 2), seed=0)
    assert [trial.effect for trial in trials] == pytest.approx([-0.225, 0.5])
    assert {trial.measure for trial in trials} == {"score"}
    small = advice.affinity(
        [advice.ShortRun("a", 1.0, s, e, "score") for s, e in enumerate((-0.01, -0.02, -0.015))], "a"
    )
    assert advice.advise(None, small) == (
        "down-weight",
        "short trials with it worsen the target's score on validation data",
    )


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


def test_only_gains_have_a_colour():
    findings = [AuxiliaryFinding("a", curve(*GOOD), None, None, None, 0.2, "use", "why", "score")]
    table = verdict_table(Diagnosis("t", tuple(findings), {}))
    assert [c.name for c in table.columns if c.signed and not c.is_neutral] == ["TG at the best λ", "TG at λ = 1"]
    notes = "\n".join(table.notes)
    assert "relative rise of its validation score" in notes
    assert "own sampling error no interval holds" in notes
    assert "not corrected for that choice" in notes


def test_a_diagnosis_does_every_piece_once_and_reads_no_test_split(tmp_path, monkeypatch):
    planned(monkeypatch)
    loaded, out = fm.load_recipe("compare_problem:recipe"), tmp_path / "d"
    test_reads.clear()
    events = []
    found = diagnosis.diagnose(loaded, out, budget=1, watch=events.append)
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


def source(name="apart"):
    return SeededSource(dict(fm.load_recipe(f"compare_problem:{name}").source), "tgt")


def pictured(name="apart"):
    return Pictures.from_json(pieces.do(pieces.Piece(source(name), WHOLE, "tgt", "pictures")))


def test_pictures_lie_between_models_trained_alone_and_with_auxiliaries():
    test_reads.clear()
    found = pictured()
    grades = [do_transfer_run(TransferRun(source(), 0, task, 1.0, steps=6)) for task in ("", "aux", "odd")]
    (mixture,) = found.mixtures
    assert mixture.names == ("tgt alone", "with aux", "with odd")
    assert len(mixture.gains) == 66
    by_point = dict(zip(mixture.coefficients, mixture.gains, strict=True))
    criterion = Criterion(grades[0].directions).with_reference(grades[0].metrics["validation"])
    scores = [criterion.score(grade.metrics["validation"]) for grade in grades]
    for point, score in zip(((1, 0, 0), (0, 1, 0), (0, 0, 1)), scores, strict=True):
        assert by_point[point] == pytest.approx(score - scores[0])
    assert [line.names for line in found.lines] == [("tgt alone", "with aux"), ("tgt alone", "with odd")]
    for line, grade in zip(found.lines, grades[1:], strict=True):
        assert (line.losses[0], line.losses[-1]) == pytest.approx((grades[0].loss, grade.loss))
        assert len(line.positions) == 11
    assert not test_reads


def test_a_picture_that_cannot_be_made_is_left_out_with_the_reason(monkeypatch):
    pytest.importorskip("sklearn")
    found = pictured()
    assert [(made.auxiliary, made.split) for made in found.features] == [("aux", "validation")]
    assert found.features[0].panels[0].origins.count("held-out") == 24
    (note,) = found.notes
    assert note.startswith("No t-SNE picture of odd: RuntimeError: mat1 and mat2")
    assert pictured("recipe").notes == (
        "No t-SNE picture of aux, odd: the examples are the target's own, whatever λ is.",
    )
    real = builtins.__import__

    def without(name, *rest, **options):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr(pieces, "reads_heldout", lambda *rest: False)
    bare = pictured()
    assert not bare.features
    assert not bare.lines
    assert bare.mixtures == found.mixtures
    assert bare.notes[0].startswith("No t-SNE picture of aux, odd: t-SNE needs scikit-learn")
    assert bare.notes[1].startswith("No loss between the models")


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
    diagnosis.diagnose(changed, tmp_path / "d", budget=1, watch=events.append)
    (warning,) = [event["text"] for event in events if event["event"] == "warning"]
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
        ("pieces/*.json", "is not a piece of a diagnosis: KeyError.'result'"),
        ("diagnosis_plan.json", "is not a diagnosis: KeyError.'about', 'costs', 'plan'"),
        ("diagnosis.json", "is not a diagnosis: KeyError.'diagnosis'"),
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
