"""Rules among the candidates of a search, in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run
from forkmerge.algorithms.run_record import Run
from forkmerge.analysis import replayed_search
from problems import (
    SGD,
    Stopped,
    counting_steps,
    evaluation,
    fit,
    noisy_net,
    predict_target,
    shared_problem,
    stop_at,
)

RULES = ("one_standard_error", "bagged")
METRICS: dict[str, Any] = {
    "accuracy": fm.accuracy,
    "nll": fm.nll,
    "several": {"accuracy": fm.accuracy, "nll": fm.nll},
}


def searched(run: Run) -> list[dict[str, float]]:
    return [finished.coefficients for finished in run.searched]


def test_argmax_is_what_there_was() -> None:
    plain, named = (fit(fm.ForkMerge("per_auxiliary", interval=4, **o)) for o in ({}, {"rule": "argmax"}))
    assert_same_run(plain, named)


@pytest.mark.parametrize("options", [{}, {"search_examples": 10}, {"search": fm.Grid(3)}], ids=repr)
@pytest.mark.parametrize("rule", RULES)
def test_a_replay_by_plain_passes_chooses_the_same_and_the_promise_holds(
    rule: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The twin: every candidate's costs from one pass in file order, without a race."""
    for name, metrics in METRICS.items():
        algorithm = fm.ForkMerge("per_auxiliary", interval=4, rule=rule, keep_branches=True, **options)
        recipe = fm.Recipe(shared_problem(metrics=metrics), noisy_net, SGD, 8, algorithm, {"threads": 1})
        folder = tmp_path / name
        run = recipe.fit(folder=folder)
        for finished in run.searched:
            saved = replayed_search.open_round(folder, recipe, finished.index)
            replay = saved.replay()
            assert replay.chosen == pytest.approx(finished.coefficients, abs=2e-3 if rule == "bagged" else 0)
            assert not any(candidate.is_bound for candidate in finished.candidates)
            scores = {branch: record.score for branch, record in finished.branches.items()}
            best = max(scores, key=scores.__getitem__)
            vertex = tuple(float(branch == best) for branch in saved.names)
            pair = saved._scores.table(saved.evaluation, None, [vertex, tuple(finished.coefficients.values())])
            assert scores[best] - finished.score <= pair.standard_error(0, 1) + 1e-9


def test_uniform_coefficients_win_where_nothing_tells_branches_apart() -> None:
    """Two branches of the same task weights make the same errors."""
    branches = {"alone": {"tgt": 1.0}, "twin": {"tgt": 1.0}}
    for rule, expected in (("argmax", 1.0), ("one_standard_error", 0.5), ("bagged", 0.5)):
        run = fit(fm.ForkMerge(branches, interval=4, rule=rule), shared_problem(metrics=fm.accuracy))
        assert all(c["alone"] == pytest.approx(expected) for c in searched(run))
        assert_same_bits(run, fit(fm.SingleTask(interval=4), shared_problem(metrics=fm.accuracy)))


@pytest.mark.parametrize("rule", RULES)
def test_confidence_asks_about_what_the_rule_has_chosen(rule: str) -> None:
    options = {"mixtures": "per_auxiliary", "interval": 4, "rule": rule}
    problem = shared_problem(metrics=fm.nll)
    plain, easy = (
        fit(fm.ForkMerge(**{"mixtures": "mixed", **options}), problem),
        fit(fm.ForkMerge(**{"mixtures": "mixed", **options}, confidence=0.001), problem),
    )
    assert_same_bits(plain, easy)
    sure = fit(fm.ForkMerge(**{"mixtures": "mixed", **options}, confidence=0.999999), problem)
    first = sure.searched[0]
    assert first.certainty == easy.searched[0].certainty
    assert first.certainty is None or first.coefficients["alone"] == 1.0
    assert any(finished.certainty is not None for finished in sure.searched)


@pytest.mark.parametrize("rule", RULES)
def test_runs_resume_and_refit_to_the_same_bits(rule: str, tmp_path: Path) -> None:
    algorithm = fm.ForkMerge("per_auxiliary", interval=4, rule=rule, refit=True, search_by="nll")
    problem = shared_problem(metrics=fm.accuracy)
    whole = fit(algorithm, problem, noisy_net)
    refitted = [finished.coefficients for finished in whole.rounds if finished.phase == "refit"]
    assert refitted == searched(whole)
    for count in (7, 14, 20):
        folder = tmp_path / str(count)
        with pytest.raises(Stopped):
            fit(algorithm, problem, noisy_net, folder=folder, on_event=stop_at(count))
        assert_same_run(fit(algorithm, problem, noisy_net, folder=folder, resume=True), whole)


def test_processes_have_the_same_bits() -> None:
    algorithm, problem = fm.ForkMerge("per_auxiliary", interval=6, rule="bagged"), shared_problem(metrics=fm.nll)
    here, there = (fit(algorithm, problem, noisy_net, workers=workers) for workers in (1, 2))
    assert_same_run(here, there)


def test_a_search_that_costs_more_than_a_tenth_of_training_is_noted() -> None:
    problem = shared_problem(metrics=fm.nll)
    for rule in RULES:
        (note,) = (n for n in fit(fm.ForkMerge("mixed", interval=4, rule=rule), problem).notes if "of training" in n)
        assert rule in note
        assert "24 validation examples for each of up to 5 candidates" in note
        assert "a longer interval" in note
    few = fit(fm.ForkMerge("mixed", interval=25, rule="bagged"), problem, steps=25).notes
    assert any("search_examples=14 makes it 10%" in note for note in few)
    smaller = fm.ForkMerge("mixed", interval=25, rule="bagged", search_examples=14)
    assert not any("of training" in note for note in fit(smaller, problem, steps=25).notes)
    assert not any("of training" in note for note in fit(fm.ForkMerge("mixed", interval=4), problem).notes)


class TestRefused:
    """Before training, with one sentence."""

    def refuse(self, monkeypatch: Any, message: str, algorithm: fm.ForkMerge, problem: Any = None) -> None:
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.ProblemError, match=message):
            fit(algorithm, problem)
        assert trained == []

    def test_metrics_that_do_not_add_up(self, monkeypatch: Any) -> None:
        for rule in RULES:
            self.refuse(monkeypatch, f"rule='{rule}' compares.*metrics that add up", fm.ForkMerge("mixed", rule=rule))
        turned = shared_problem(validation=evaluation(metrics=fm.nll, higher_is_better={"nll": True}))
        self.refuse(monkeypatch, "metrics that add up", fm.ForkMerge("mixed", rule="bagged"), turned)

    def test_predictions_that_do_not_belong_to_single_examples(self, monkeypatch: Any) -> None:
        def some(model: Any, batch: Any) -> Any:
            predictions, targets = predict_target(model, batch)
            return predictions[targets > 0], targets[targets > 0]

        data = evaluation(metrics=fm.nll)
        dropping = shared_problem(validation=fm.Evaluation(data.dataset, fm.nll, some))
        for algorithm in (fm.ForkMerge("mixed", rule="bagged"), fm.ForkMerge("mixed", confidence=0.9)):
            self.refuse(monkeypatch, "metrics that add up", algorithm, dropping)

    def test_fixed_coefficients(self, monkeypatch: Any) -> None:
        algorithm = fm.ForkMerge("mixed", rule="bagged", search="fixed")
        self.refuse(monkeypatch, "fixed coefficients are not searched", algorithm, shared_problem(metrics=fm.nll))

    def test_a_rule_that_there_is_not(self) -> None:
        with pytest.raises(fm.ProblemError, match="rule must be one of argmax, one_standard_error, bagged"):
            fm.ForkMerge("mixed", rule="mean")

    def test_a_replay_by_a_metric_that_does_not_add_up(self, tmp_path: Path) -> None:
        algorithm = fm.ForkMerge("mixed", interval=4, keep_branches=True)
        recipe = fm.Recipe(shared_problem(), noisy_net, SGD, 4, algorithm, {"threads": 1})
        recipe.fit(folder=tmp_path / "run")
        saved = replayed_search.open_round(tmp_path / "run", recipe, 1)
        with pytest.raises(fm.ProblemError, match="metrics that add up"):
            saved.replay(rule="bagged")
        with pytest.raises(fm.ProblemError, match="fixed coefficients are not searched"):
            saved.replay(rule="bagged", search="fixed")
        assert saved.replay(rule="bagged", metrics=fm.nll).question == "another metric, rule"
