"""A diagnosis: what fits into a budget, what a resume does not do again, and what is advised."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

import forkmerge as fm
from compare_problem import recipe, test_reads
from forkmerge.analysis import advice, budget, diagnosis, pieces
from forkmerge.analysis.transfer import transfer_curve
from forkmerge.analysis.verdicts import verdict_table
from forkmerge.cli import app
from forkmerge.errors import ConfigError, ProblemError, StoreError
from forkmerge.tables import to_markdown

COSTS = budget.Costs(alone=0.01, pairs={"a": 0.02, "b": 0.02}, fixed=0.5, loading=1.0)
PROBE = advice.ProbePlan(100, 50)
SMALL = budget.Plan(2, (0.5, 1.0), 4, 6, 1, 2, 2, advice.ProbePlan(2, 1), 1, 1.0)


def curve(*gains, weight=1.0):
    seeds = range(len(gains))
    return transfer_curve(
        {weight: dict(zip(seeds, gains, strict=True))}, dict.fromkeys(seeds, 0.0), target="t", auxiliary="a"
    )


def planned(monkeypatch, plan=SMALL):
    monkeypatch.setattr(diagnosis, "time_trial", lambda recipes: budget.Costs(0.01, {"aux": 0.01, "odd": 0.01}, 0.1, 0))
    monkeypatch.setattr(diagnosis, "plan_budget", lambda *arguments: plan)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("45", 45)])
def test_a_budget_is_a_duration(text, seconds):
    assert budget.seconds_from(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0m", "-3m", "5 weeks"])
def test_a_budget_that_is_none_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="20m"):
        budget.seconds_from(text)


def test_a_larger_budget_never_buys_less_and_every_plan_fits():
    plans = [budget.plan_budget(COSTS, PROBE, 1000, seconds, 2) for seconds in (60, 120, 300, 600, 3600, 36000)]
    for plan, seconds in zip(plans, (60, 120, 300, 600, 3600, 36000), strict=True):
        assert plan.estimate <= seconds
    ranks = [(plan.steps, plan.seeds * len(plan.weights)) for plan in plans]
    assert ranks == sorted(ranks)
    assert plans[0].steps < plans[-1].steps == 1000
    assert all(plan.weights[-1] == 1 for plan in plans)


def test_a_budget_that_buys_nothing_is_refused_with_what_is_needed():
    with pytest.raises(ConfigError, match=r"too small.*--budget \d+m"):
        budget.plan_budget(COSTS, PROBE, 100000, 5, 1)


def test_a_plan_costs_what_its_pieces_cost():
    works = budget.piece_seconds(SMALL, COSTS)
    kinds = [key[0] for key in works]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "single task": 2,
        "transfer": 8,
        "probe": 2,
        "ForkMerge": 1,
        "gradients": 1,
    }
    assert works["transfer", "a", 0.5, 1] == pytest.approx(0.5 + 4 * 0.02)
    assert [key[3] for key in budget.longest_first(works)] == sorted(key[3] for key in works)


def test_a_probe_costs_at_most_its_share():
    problem = recipe().problem  # one stream for all tasks: a pair costs as much as the target alone
    for share in (0.05, 0.1, 0.2):
        plan = advice.plan_probe(problem, 1000, share)
        assert 0.9 * share <= advice.compute_share(problem, plan, 1000) <= share


def test_a_probe_compares_branches_of_one_trunk_on_the_same_batches():
    r = recipe(0)
    trials = advice.probe(r, advice.ProbePlan(3, 2), seed=0)
    assert [trial.auxiliary for trial in trials] == ["aux", "odd"]
    (same,) = [t.effect for t in advice.probe(r, advice.ProbePlan(3, 2), seed=0) if t.auxiliary == "aux"]
    assert same == trials[0].effect
    harmless = advice.probe(r, advice.ProbePlan(3, 2, (1e-12,)), seed=0)
    assert all(abs(trial.effect) < 1e-6 for trial in harmless)


def test_affinity_is_the_mean_over_seeds_and_a_diverged_trial_is_as_bad_as_can_be():
    trials = [advice.Trial("a", 1.0, seed, value) for seed, value in enumerate((0.1, 0.2, 0.3))]
    assert advice.affinity(trials, "a").mean == pytest.approx(0.2)
    assert advice.affinity([*trials, advice.Trial("a", 1.0, 3, math.nan)], "a").is_negative


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
    trials = [advice.Trial("a", 1.0, seed, value) for seed, value in enumerate(effects)]
    found, reason = advice.advise(curve(*gains), advice.affinity(trials, "a"))
    assert found == advised
    assert reason


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
    assert again.findings == found.findings
    assert "down-weight" in to_markdown([verdict_table(found)]) or found.findings[0].advice != "down-weight"


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
    assert len(done) == len(set(done)) == len(budget.piece_seconds(SMALL, budget.Costs(1, {"aux": 1, "odd": 1}, 1, 1)))
    assert done[:4] == first
    monkeypatch.setattr(diagnosis, "do", pieces.do)
    whole = diagnosis.diagnose(loaded, tmp_path / "e", budget=1)
    assert whole.findings == found.findings


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
