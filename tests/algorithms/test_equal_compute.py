"""What the same compute buys without merging: the best of several runs, and the average of several runs."""

from __future__ import annotations

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run
from forkmerge.algorithms.equal_compute import AveragedSingleTask, BestOf, Scaled
from forkmerge.algorithms.events import PhaseStarted, RoundFinished
from forkmerge.problem.randomness import derive
from problems import SGD, Stopped, fit, noisy_net, plain_net, seeded, shared_problem

STL = fm.SingleTask()


def candidate(rate: float, restart: int, **options):
    seed = derive(0, "restart", restart) if restart else 0
    return fit(STL, optimizer=Scaled(SGD, rate), seed=seed, **options)


def test_the_best_candidate_on_validation_is_returned():
    run = fit(BestOf(STL, runs=5))
    candidates = [candidate(rate, restart) for rate, restart in [(1, 0), (1 / 3, 0), (3, 0), (1, 1), (1 / 3, 1)]]
    best = max(candidates, key=lambda each: each.score)
    assert_same_bits(run, best)
    assert run.score == best.score
    assert run.notes[-1].startswith("best of 5 on validation: learning rate × ")


def test_one_candidate_is_the_algorithm_itself():
    assert_same_bits(fit(BestOf(STL, runs=1)), fit(STL))


def test_the_best_candidate_is_refitted_on_all_labels():
    run = fit(BestOf(fm.SingleTask(refit=True), runs=3))
    rates = (1, 1 / 3, 3)
    best = max(rates, key=lambda rate: candidate(rate, 0).score)
    assert_same_bits(run, fit(fm.SingleTask(refit=True), optimizer=Scaled(SGD, best)))
    assert run.final == "refit"


def test_a_model_that_was_given_is_what_every_candidate_starts_from():
    model = seeded(plain_net)
    run = fit(BestOf(STL, runs=4, rates=(1.0,)), net=model)
    assert run.model is model
    scores = [
        fit(STL, net=seeded(plain_net), seed=derive(0, "restart", index) if index else 0).score for index in range(4)
    ]
    assert run.score == max(scores)


def test_the_average_is_that_of_runs_from_one_start_with_their_own_order():
    run = fit(AveragedSingleTask(runs=3), net=seeded(noisy_net))
    parts = [
        fit(STL, net=seeded(noisy_net), seed=derive(0, "order", index) if index else 0).model.state_dict()
        for index in range(3)
    ]
    for name, tensor in run.model.state_dict().items():
        values = [part[name] for part in parts]
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, torch.stack(values).mean(0), rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(tensor, values[0])
    assert run.metrics == fm.measure(run.model, shared_problem().target_validation)
    assert run.final == "uniform average of 3 runs"


def test_one_averaged_run_is_single_task_training():
    assert_same_bits(fit(AveragedSingleTask(runs=1)), fit(STL))


@pytest.mark.parametrize("algorithm", [BestOf(STL, runs=3), AveragedSingleTask(runs=3)])
def test_stopped_in_the_middle_they_go_on(tmp_path, algorithm):
    seen = []

    def observe(event):
        seen.append(type(event))
        if seen.count(PhaseStarted) == 2 and isinstance(event, RoundFinished):
            raise Stopped

    with pytest.raises(Stopped):
        fit(algorithm, folder=tmp_path / "run", on_event=observe)
    again = fit(algorithm, folder=tmp_path / "run", resume=True)
    whole = fit(algorithm)
    assert_same_run(again, whole)


def test_learning_rates_are_set_with_their_proportions_kept():
    net = plain_net()
    groups = fm.OptimizerOf("SGD", group_lr={"body": 0.1}, lr=0.2)
    rates = [group["lr"] for group in Scaled(groups, lr=1.0)(net).param_groups]
    assert rates == pytest.approx([0.1, 1.0])
    assert [group["lr"] for group in Scaled(groups, 3.0)(net).param_groups] == pytest.approx([0.06, 0.6])


def test_a_learning_rate_that_is_set_is_exact():
    assert Scaled(fm.OptimizerOf("Adam", lr=0.3), lr=0.1)(plain_net()).param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("make", [lambda: BestOf(STL, runs=0), lambda: AveragedSingleTask(runs=True)])
def test_a_number_of_runs_that_is_none_is_refused(make):
    with pytest.raises(fm.ProblemError, match="runs must be a positive integer"):
        make()


def test_rates_that_are_none_are_refused():
    with pytest.raises(fm.ProblemError, match="rates must be positive"):
        BestOf(STL, runs=2, rates=(0.0,))
