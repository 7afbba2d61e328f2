"""Previous merges among what a search may take, in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run
from forkmerge.analysis import replayed_search
from forkmerge.analysis.dynamics import coefficient_history
from problems import SGD, Stopped, diverging_problem, fit, noisy_net, shared_problem, stop_at

LAST, BEFORE = "previous merge", "previous merge 2"


class Stays(fm.Grid):
    """Answers with the previous merge, whatever it scores."""

    guarded = True

    def search(self, score: Any, branches: int) -> tuple[float, ...]:
        return (*(0.0,) * (branches - 1), 1.0)


def the_same(predictions: Any, targets: Any) -> float:
    return 1.0


def test_a_merge_is_never_worse_than_the_last_ones() -> None:
    for metric in (fm.nll, fm.accuracy):
        for count in (1, 3):
            algorithm = fm.ForkMerge("per_auxiliary", interval=2, previous_merges=count)
            run = fit(algorithm, shared_problem(metrics=metric), noisy_net, steps=16)
            scores = [r.score for r in run.searched]
            assert scores == sorted(scores), "each may be taken whole"
            assert all(r.score >= max(b.score for b in r.branches.values()) for r in run.searched)
            names = [list(r.coefficients)[3:] for r in run.searched]
            expected = [LAST, BEFORE, "previous merge 3"]
            assert names == [expected[: min(count, r.index)] for r in run.searched]


@pytest.mark.parametrize("metric", [fm.nll, None], ids=["raced", "whole passes"])
@pytest.mark.parametrize(
    "options",
    [
        {"previous_merges": 3, "optimizer_state": "average"},
        {"previous_merges": 1, "search": fm.Sums((0.5, 1.0), (1.5,)), "bn": "recompute", "bn_batches": 2},
        {"previous_merges": 2, "search_examples": 10, "select": "best"},
    ],
    ids=["three", "sums", "sub-sample"],
)
def test_the_bits_depend_neither_on_processes_nor_on_being_resumed(
    tmp_path: Path, options: dict[str, Any], metric: Any
) -> None:
    problem = shared_problem(metrics=metric) if metric else shared_problem()
    algorithm = fm.ForkMerge("per_auxiliary", interval=3, refit=True, **options)
    whole = fit(algorithm, problem, noisy_net)
    assert whole.final == "refit"
    if metric is None and "search" in options:  # processes measure whole passes
        assert_same_run(fit(algorithm, problem, noisy_net, workers=2), whole)
    with pytest.raises(Stopped):
        fit(algorithm, problem, noisy_net, folder=tmp_path / "run", on_event=stop_at(14), checkpoint_every=2)
    assert_same_run(fit(algorithm, problem, noisy_net, folder=tmp_path / "run", resume=True), whole)


@pytest.mark.parametrize("policy", ["keep", "average", "reset"])
def test_a_run_that_always_stays_returns_the_first_weights(policy: str) -> None:
    first = fit(fm.SingleTask(), steps=1, optimizer=fm.OptimizerOf("SGD", lr=0.0))
    algorithm = fm.ForkMerge("mixed", search=Stays(), interval=3, previous_merges=1, optimizer_state=policy, refit=True)
    run = fit(algorithm, shared_problem(metrics=the_same), steps=9)
    assert_same_bits(run, first)
    assert all(r.coefficients == {"alone": 0.0, "joint": 0.0, LAST: 1.0} for r in run.rounds)
    assert all(r.relevance == {} for r in run.rounds)
    assert run.relevance == {}
    assert "previous merge 1.00" in repr(run)


def test_who_returns_where_only_earlier_merges_were_taken_has_a_fresh_optimizer() -> None:
    algorithm = fm.ForkMerge("per_auxiliary", search=Stays(), interval=2, previous_merges=1, per_round=1, refit=True)
    run = fit(algorithm, shared_problem(metrics=the_same), steps=8)
    assert [list(r.branches)[1] for r in run.searched] == ["aux", "odd", "aux", "odd"]


def test_one_branch_is_searched_along_its_own_way() -> None:
    algorithm = fm.ForkMerge({"alone": {"tgt": 1.0}}, interval=2, previous_merges=1, refit=True)
    run = fit(algorithm, shared_problem(metrics=fm.nll), noisy_net, steps=12)
    assert run.searched
    assert any(0 < r.coefficients[LAST] < 1 for r in run.searched)


def test_relevance_is_that_of_the_branches_taken() -> None:
    run = fit(fm.ForkMerge("per_auxiliary", interval=2, previous_merges=1), net=noisy_net, optimizer=SGD, steps=16)
    mixed = [r for r in run.searched if 0 < r.coefficients[LAST] < 1]
    assert mixed
    for r in mixed:
        total = 1 - r.coefficients[LAST]
        assert r.relevance["tgt"] == pytest.approx(1.0)
        assert r.relevance["aux"] == pytest.approx(r.coefficients["aux"] / total)
    assert LAST in coefficient_history([run]).branches


def test_where_every_branch_is_faulty_the_last_merge_stands_and_none_is_searched() -> None:
    tasks = {"alone": {"tgt": 1.0, "odd": 0.1}, "more": {"tgt": 1.0, "odd": 0.5}}
    run = fit(fm.ForkMerge(tasks, interval=4, previous_merges=2), diverging_problem(6, "odd"), noisy_net)
    assert run.rounds[1].coefficients == {}
    assert any("every branch was faulty" in note for note in run.notes)


@pytest.mark.parametrize("rule", ["one_standard_error", "bagged"])
def test_rules_prefer_uniform_coefficients_of_branches(rule: str) -> None:
    branches = {"alone": {"tgt": 1.0}, "twin": {"tgt": 1.0}}
    algorithm = fm.ForkMerge(branches, interval=6, rule=rule, previous_merges=1)
    run = fit(algorithm, shared_problem(metrics=fm.nll), noisy_net)
    first = run.searched[0]
    assert {c.coefficients["alone"] for c in first.candidates if c.coefficients["alone"] == c.coefficients["twin"] > 0}
    if rule == "one_standard_error":
        assert first.coefficients == {"alone": 0.5, "twin": 0.5, LAST: 0.0}


def test_a_kept_round_cannot_be_asked_again(tmp_path: Path) -> None:
    for options in ({"previous_merges": 1}, {"layer_groups": "modules"}):
        algorithm = fm.ForkMerge(interval=4, keep_branches=True, **{"mixtures": "mixed", **options})
        recipe = fm.Recipe(shared_problem(metrics=fm.nll), noisy_net, SGD, 4, algorithm, {"threads": 1})
        folder = tmp_path / next(iter(options))
        recipe.fit(folder=folder)
        with pytest.raises(fm.StoreError, match="cannot be asked again"):
            replayed_search.open_round(folder, recipe, 1)


def test_what_cannot_be_is_refused() -> None:
    for options, message in (
        ({"previous_merges": 0}, "previous_merges must be a positive integer"),
        ({"previous_merges": 1, "search": "fixed"}, "previous_merges is for coefficients that are searched"),
        ({"average_iterates": 1}, "average_iterates must be at least 2"),
    ):
        with pytest.raises(fm.ProblemError, match=message):
            fm.ForkMerge(**{"mixtures": "mixed", **options})
    with pytest.raises(fm.ProblemError, match="the binary search merges two branches, got 3"):
        fit(fm.ForkMerge("mixed", search="binary", previous_merges=1))
    with pytest.raises(fm.ProblemError, match="a branch is called 'previous merge'"):
        fit(fm.ForkMerge({LAST: {"tgt": 1.0}, "b": {"tgt": 1.0, "aux": 1.0}}, previous_merges=1))
