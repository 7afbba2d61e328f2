"""Coefficients of layer groups, in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run
from forkmerge.algorithms.run_record import Run, rounds_table
from problems import Stopped, fit, noisy_net, shared_problem, stop_at

GROUPS = {"lower": "body.0", "head": "heads.tgt"}


def test_a_merge_is_never_worse_than_one_with_the_same_coefficients_for_all_layers() -> None:
    for metric in (fm.nll, fm.accuracy):
        problem = shared_problem(metrics=metric)
        plain, run = (
            fit(fm.ForkMerge("per_auxiliary", interval=12, layer_groups=g), problem, noisy_net)
            for g in (None, "modules")
        )
        assert run.rounds[0].score >= plain.rounds[0].score
        assert run.rounds[0].score >= max(branch.score for branch in run.rounds[0].branches.values())


@pytest.mark.parametrize("metric", [fm.nll, None], ids=["raced", "whole passes"])
@pytest.mark.parametrize(
    "options", [{"search_examples": 12, "bn": "recompute", "bn_batches": 2}, {"rule": "bagged"}], ids=["sample", "rule"]
)
def test_the_bits_depend_neither_on_processes_nor_on_being_resumed(
    tmp_path: Path, options: dict[str, Any], metric: Any
) -> None:
    if metric is None and "rule" in options:
        options = {"search": fm.Sums((0.5,), (1.5,)), "optimizer_state": "average"}
    problem = shared_problem(metrics=metric) if metric else shared_problem()
    algorithm = fm.ForkMerge(interval=4, refit=True, layer_groups=GROUPS, **{"mixtures": "mixed", **options})
    whole = fit(algorithm, problem, noisy_net)
    assert any(r.groups for r in whole.rounds)
    if metric is None and "search" in options:
        assert_same_run(fit(algorithm, problem, noisy_net, workers=2), whole)
    with pytest.raises(Stopped):
        fit(algorithm, problem, noisy_net, folder=tmp_path / "run", on_event=stop_at(7))
    assert_same_run(fit(algorithm, problem, noisy_net, folder=tmp_path / "run", resume=True), whole)
    replayed = [r.groups for r in whole.rounds if r.phase == "refit"]
    assert replayed == [r.groups for r in whole.searched]


def test_coefficients_and_relevance_are_means_and_records_come_back() -> None:
    run = fit(fm.ForkMerge("mixed", interval=5, layer_groups=GROUPS), net=noisy_net, seed=1, steps=5)
    sizes = {
        "lower": sum(p.numel() for p in run.model.body[0].parameters()),
        "head": sum(p.numel() for p in run.model.heads["tgt"].parameters()),
    }
    total = sum(p.numel() for p in run.model.parameters())
    sizes["rest"] = total - sum(sizes.values())
    (ended,) = run.rounds
    assert ended.groups is not None
    for name, share in ended.coefficients.items():
        assert share == pytest.approx(sum(size * ended.groups[group][name] for group, size in sizes.items()) / total)
    assert ended.relevance["aux"] == pytest.approx(ended.coefficients["joint"])
    assert any(candidate.groups == ended.groups for candidate in ended.candidates)
    assert Run.from_json(run.to_json()).rounds == run.rounds
    assert "round 1: head: alone" in repr(run)
    assert any(note.startswith("round 1: head: alone") for note in rounds_table(run.searched).notes)


def test_the_rule_that_prefers_uniform_coefficients_does_so_in_every_group() -> None:
    branches = {"alone": {"tgt": 1.0}, "twin": {"tgt": 1.0}}
    algorithm = fm.ForkMerge(branches, interval=4, rule="one_standard_error", layer_groups=GROUPS)
    run = fit(algorithm, shared_problem(metrics=fm.accuracy))
    assert all(r.coefficients == {"alone": 0.5, "twin": 0.5} and r.groups is None for r in run.rounds)


def test_doubt_falls_back_on_the_target_alone_in_all_groups() -> None:
    algorithm = fm.ForkMerge("mixed", interval=4, layer_groups=GROUPS, confidence=0.999)
    run = fit(algorithm, shared_problem(metrics=fm.accuracy), noisy_net)
    doubted = [r for r in run.rounds if r.certainty is not None and r.certainty < 0.999]
    assert doubted
    assert all(r.groups is None and r.coefficients["alone"] == 1.0 for r in doubted)


def test_with_one_branch_there_is_nothing_to_group() -> None:
    alone = {"alone": {"tgt": 1.0}}
    assert_same_bits(*(fit(fm.ForkMerge(alone, interval=4, layer_groups=g)) for g in (None, GROUPS)))


def test_what_cannot_be_is_refused_before_training() -> None:
    with pytest.raises(fm.ProblemError, match="layer_groups is for coefficients that are searched"):
        fm.ForkMerge("mixed", search="fixed", layer_groups="modules")
    with pytest.raises(fm.ProblemError, match="names 'encoder', which has no trainable parameter"):
        fit(fm.ForkMerge("mixed", layer_groups={"encoder": "encoder"}))
