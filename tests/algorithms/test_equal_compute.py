"""What the same compute buys without merging: the best of several runs, and the average of several runs."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run
from forkmerge.algorithms.equal_compute import Averaged, BestOf, Scaled
from forkmerge.algorithms.events import PhaseStarted, RoundFinished
from forkmerge.problem.batches import batches
from forkmerge.problem.randomness import derive
from problems import SGD, Stopped, fit, noisy_net, plain_net, seeded, shared_problem
from run_folders import as_earlier_version

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


@pytest.mark.parametrize("algorithm", [STL, fm.PostTrain(), fm.JointThenAlone()], ids=repr)
def test_the_average_is_that_of_runs_from_one_start_with_their_own_order(algorithm):
    run = fit(Averaged(algorithm, runs=3), net=seeded(noisy_net))
    parts = runs_by_hand(algorithm)
    for name, tensor in run.model.state_dict().items():
        values = [part[name] for part in parts]
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, torch.stack(values).mean(0), rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(tensor, values[0])
    assert run.metrics == fm.measure(run.model, shared_problem().target_validation)
    assert run.final == "uniform average of 3 runs"


def runs_by_hand(algorithm):
    seeds = [derive(0, "order", index) if index else 0 for index in range(3)]
    return [fit(algorithm, net=seeded(noisy_net), seed=seed).model.state_dict() for seed in seeds]


def naive_statistics(net, batches, layer):
    """The cumulative mean of the batches' own statistics of a layer, as a loop."""
    seen = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        for inputs, _ in batches:
            net.body(inputs)
    hook.remove()
    return torch.stack([x.mean(0) for x in seen]).mean(0), torch.stack([x.var(0) for x in seen]).mean(0)


@pytest.mark.parametrize("refit", [False, True])
def test_statistics_of_the_average_can_be_recomputed_on_the_targets_training_data(refit):
    algorithm = fm.SingleTask(refit=refit)
    averaged = fit(Averaged(algorithm, runs=3), net=seeded(noisy_net))
    run = fit(Averaged(algorithm, runs=3, bn="recompute", bn_batches=4), net=seeded(noisy_net))
    problem = shared_problem().with_validation_labels() if refit else shared_problem()
    seed = derive(0, "bn", averaged.steps)
    ((name, stream),) = problem.stream_map.items()
    norm = averaged.model.eval().body[1]
    with closing(batches(name, stream, range(4), seed, torch.device("cpu"))) as feed:
        mean, var = naive_statistics(averaged.model, feed, norm)
    torch.testing.assert_close(run.model.body[1].running_mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.model.body[1].running_var, var, rtol=1e-4, atol=1e-5)
    assert torch.equal(run.model.body[0].weight, averaged.model.body[0].weight), "weights are the average's"
    assert (run.metrics == {}) is refit


def test_statistics_of_one_run_are_its_own():
    assert_same_bits(fit(Averaged(STL, runs=1, bn="recompute"), net=seeded(noisy_net)), fit(STL, net=seeded(noisy_net)))


def test_a_folder_begun_when_only_single_task_training_was_averaged_goes_on(tmp_path):
    algorithm = Averaged(fm.SingleTask(4, "best", True), runs=2)
    interrupt_second_part(algorithm, tmp_path / "run")
    former = {"name": "AveragedSingleTask", "runs": 2, "interval": 4, "select": "best", "refit": True}
    as_earlier_version(tmp_path / "run", algorithm=former)
    with pytest.raises(fm.StoreError, match="runs was 2 and is 3 now"):
        fit(replace(algorithm, runs=3), folder=tmp_path / "run", resume=True)
    assert_same_run(fit(algorithm, folder=tmp_path / "run", resume=True), fit(algorithm))


def interrupt_second_part(algorithm, folder):
    seen = []

    def observe(event):
        seen.append(type(event))
        if seen.count(PhaseStarted) == 2 and isinstance(event, RoundFinished):
            raise Stopped

    with pytest.raises(Stopped):
        fit(algorithm, folder=folder, on_event=observe)


def test_one_averaged_run_is_single_task_training():
    assert_same_bits(fit(Averaged(STL, runs=1)), fit(STL))


@pytest.mark.parametrize(
    "algorithm", [BestOf(STL, runs=3), Averaged(STL, runs=3), Averaged(fm.JointThenAlone(), runs=3)]
)
def test_stopped_in_the_middle_they_go_on(tmp_path, algorithm):
    interrupt_second_part(algorithm, tmp_path / "run")
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


@pytest.mark.parametrize("make", [lambda: BestOf(STL, runs=0), lambda: Averaged(STL, runs=True)])
def test_a_number_of_runs_that_is_none_is_refused(make):
    with pytest.raises(fm.ProblemError, match="runs must be a positive integer"):
        make()


@pytest.mark.parametrize(
    ("options", "message"), [({"bn": "keep"}, "bn must be"), ({"bn_batches": 0}, "bn_batches must")]
)
def test_policies_that_are_none_are_refused(options, message):
    with pytest.raises(fm.ProblemError, match=message):
        Averaged(STL, runs=2, **options)


def test_rates_that_are_none_are_refused():
    with pytest.raises(fm.ProblemError, match="rates must be positive"):
        BestOf(STL, runs=2, rates=(0.0,))
