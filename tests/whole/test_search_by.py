"""Searches that go by another metric than the target is reported in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run
from forkmerge.algorithms.run_record import Run
from forkmerge.analysis import replayed_search
from problems import SGD, Stopped, evaluation, fit, minus_loss, noisy_net, shared_problem, stop_at

POLICIES: dict[str, dict[str, Any]] = {
    "two branches": {},
    "greedy": {"mixtures": "per_auxiliary"},
    "sub-sample": {"mixtures": "per_auxiliary", "search_examples": 10},
    "chosen checkpoints": {"checkpoint": "best_so_far", "select": "best", "validate_every": 2},
    "refit of the best": {"refit": True, "select": "best"},
    "doubted": {"mixtures": "per_auxiliary", "confidence": 0.6},
    "ranking runs": {"mixtures": fm.NestedTopK(sizes=(1, 2), probe_steps=3)},
}


def class_share(predictions: Tensor, targets: Tensor) -> float:
    """A metric that does not add up over examples: the mean over classes of the accuracy in each."""
    is_right = predictions.argmax(1) == targets
    return torch.stack([is_right[targets == label].double().mean() for label in targets.unique()]).mean().item()


def coefficients(run: Run) -> list[dict[str, float]]:
    return [finished.coefficients for finished in run.rounds]


@pytest.mark.parametrize("own", [fm.accuracy, {"accuracy": fm.accuracy, "share": class_share}], ids=["one", "two"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_has_the_bits_of_one_whose_only_metric_is_the_search_s(policy: str, own: Any) -> None:
    """The twin: the same run, reported in the metric that this one searches by."""
    options = {"interval": 4, **POLICIES[policy]}
    run = fit(fm.ForkMerge(**{"mixtures": "mixed", **options}, search_by="nll"), shared_problem(metrics=own), noisy_net)
    twin = fit(fm.ForkMerge(**{"mixtures": "mixed", **options}), shared_problem(metrics=fm.nll), noisy_net)
    assert_same_bits(run, twin)
    assert coefficients(run) == coefficients(twin)
    for finished, other in zip(run.searched, twin.searched, strict=True):
        assert finished.candidates == other.candidates
        assert (finished.search_score, other.search_score) == (other.score, None)
        assert finished.certainty == other.certainty
        for name, branch in finished.branches.items():
            assert (branch.search_score, other.branches[name].search_score) == (other.branches[name].score, None)


@pytest.mark.parametrize("own", [fm.accuracy, class_share])
def test_scores_and_metrics_are_the_target_s_own(own: Any) -> None:
    problem = shared_problem(metrics={"own": own})
    run = fit(fm.ForkMerge("per_auxiliary", interval=4, search_by=fm.nll), problem, noisy_net)
    assert run.metrics == fm.measure(run.model, problem.target_validation)
    assert run.score == run.searched[-1].score == run.metrics["own"]
    for finished in run.searched:
        assert finished.metrics == {"own": finished.score}
        assert all(branch.metrics == {"own": branch.score} for branch in finished.branches.values())
        assert finished.search_score >= max(branch.search_score for branch in finished.branches.values())


def test_the_best_merge_is_the_best_by_the_search_s_metric_and_reported_in_the_target_s() -> None:
    problem = shared_problem(metrics=fm.accuracy)
    for seed in range(3):
        run = fit(fm.ForkMerge("mixed", interval=2, select="best", search_by="nll"), problem, noisy_net, seed=seed)
        best = max(run.searched, key=lambda finished: finished.search_score)
        assert (run.score, run.last_step) == (best.score, best.end)
        assert fm.measure(run.model, problem.target_validation) == pytest.approx(run.metrics)


def test_the_floor_keeps_its_promise_in_the_target_s_own_metric() -> None:
    """Turned round, the own metric is best where the search's is worst: the floor is then returned."""
    losing = {"loss": fm.nll}
    turned = shared_problem(validation=evaluation(metrics=losing, higher_is_better={"loss": True}))
    algorithm = fm.ForkMerge("mixed", interval=4, floor=True, search_by=fm.accuracy)
    run = fit(algorithm, turned, noisy_net)
    last = run.searched[-1]
    alone = fit(fm.SingleTask(interval=4), shared_problem(metrics=fm.nll), noisy_net)
    assert last.floor_score == pytest.approx(-alone.score)
    assert (run.final == "floor") == (last.floor_score > last.score)
    assert run.score == max(last.floor_score, last.score)


def test_a_metric_of_the_target_may_be_named_and_several_are_still_compared_with_the_first_round() -> None:
    problem = shared_problem(metrics={"accuracy": fm.accuracy, "loss": fm.nll})
    run = fit(fm.ForkMerge("mixed", interval=4, search_by="loss"), problem, noisy_net)
    assert_same_bits(run, fit(fm.ForkMerge("mixed", interval=4), shared_problem(metrics=fm.nll), noisy_net))
    assert run.rounds[0].branches["alone"].score == 0
    assert set(run.metrics) == {"accuracy", "loss"}


def test_a_metric_of_all_predictions_takes_full_passes() -> None:
    algorithm = fm.ForkMerge("per_auxiliary", interval=4, search_by=minus_loss)
    run = fit(algorithm, shared_problem(metrics=fm.accuracy), noisy_net)
    assert_same_bits(run, fit(fm.ForkMerge("per_auxiliary", interval=4), net=noisy_net))
    assert all(finished.examples == {} for finished in run.rounds)


def test_processes_have_the_same_bits_where_only_the_search_s_metric_adds_up() -> None:
    algorithm, problem = fm.ForkMerge("per_auxiliary", interval=6, search_by="nll"), shared_problem(metrics=class_share)
    here, there = (fit(algorithm, problem, noisy_net, workers=workers) for workers in (1, 2))
    assert_same_run(here, there)
    assert here.rounds[0].examples["full"] > 0


def test_it_resumes_to_the_same_bits(tmp_path: Path) -> None:
    algorithm = fm.ForkMerge("per_auxiliary", interval=4, select="best", search_by="nll", floor=True, refit=True)
    problem = shared_problem(metrics=fm.accuracy)
    whole = fit(algorithm, problem, noisy_net)
    for count in (7, 14, 20):
        folder = tmp_path / str(count)
        with pytest.raises(Stopped):
            fit(algorithm, problem, noisy_net, folder=folder, on_event=stop_at(count))
        assert_same_run(fit(algorithm, problem, noisy_net, folder=folder, resume=True), whole)


def test_a_replay_goes_by_it_too(tmp_path: Path) -> None:
    algorithm = fm.ForkMerge("per_auxiliary", interval=4, search_by="nll", keep_branches=True)
    for own in (fm.accuracy, class_share):
        folder = tmp_path / own.__name__
        recipe = fm.Recipe(shared_problem(metrics=own), noisy_net, SGD, 8, algorithm, {"threads": 1})
        run = recipe.fit(folder=folder)
        saved = replayed_search.open_round(folder, recipe, 2)
        replay = saved.replay()
        assert replay.chosen == run.searched[1].coefficients
        assert replay.score == pytest.approx(run.searched[1].search_score, abs=1e-6)
        assert saved.replay(metrics=own).score == pytest.approx(run.searched[1].score, abs=0.2)
        other = saved.replay(evaluation=evaluation(metrics=own, seed=77))
        assert other.score < 0
        assert saved.replay(indices=range(12)).score < 0
