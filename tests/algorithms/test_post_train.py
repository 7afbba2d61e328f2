"""Post-train is its two parts, done by hand; interrupted anywhere, it ends with the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

import forkmerge as fm
from _asserts import assert_other_bits, assert_same_bits, assert_same_run
from forkmerge.algorithms.events import StepProgress
from forkmerge.engine.storage.run_folder import status
from forkmerge.engine.training.branch import train_branch
from forkmerge.engine.training.options import Mixture, Training
from forkmerge.experiments.recipe import algorithm_from
from forkmerge.problem.randomness import derive
from problems import ADAM, TASKS, Stopped, Untouchable, evaluation, fit, noisy_net, plain_net, seeded, shared_problem

EQUAL = dict.fromkeys(TASKS, 1.0)


def by_hand(steps: tuple[int, int], seed: int = 0, refit: bool = False, net=noisy_net):
    model = seeded(net, derive(seed, "model") % 2**31)
    fit(fm.Joint(interval=2, select="best", refit=refit), net=model, steps=steps[0], seed=seed)
    fit(fm.SingleTask(interval=2, refit=refit), net=model, steps=steps[1], seed=derive(seed, "fine-tuning"))
    return model


def start(net=noisy_net, seed: int = 0):
    return seeded(net, derive(seed, "model") % 2**31)


@pytest.mark.parametrize("refit", [False, True])
def test_it_is_joint_training_then_the_target_alone(refit):
    run = fit(fm.PostTrain(pretrain_steps=6, interval=2, refit=refit), net=start(), steps=10)
    assert_same_bits(run, by_hand((6, 4), refit=refit))
    assert run.final == ("refit" if refit else "last step")


def test_half_of_the_steps_are_pretraining_unless_said_otherwise():
    assert fm.PostTrain().split(11) == (5, 6)
    assert fm.PostTrain(pretrain_steps=2).split(11) == (2, 9)


def test_the_best_checkpoint_is_fine_tuned_not_the_last():
    # A learning rate that soon diverges: what is best on validation is not what comes last.
    wild = fm.OptimizerOf("SGD", lr=4.0)
    joint = {select: fit(fm.Joint(interval=1, select=select), optimizer=wild, steps=8) for select in ("best", "last")}
    assert_other_bits(joint["best"], joint["last"])
    run = fit(fm.PostTrain(pretrain_steps=8, interval=1), optimizer=wild, steps=9)
    by_hand = fit(fm.SingleTask(), net=joint["best"].model, optimizer=wild, steps=1, seed=derive(0, "fine-tuning"))
    assert_same_bits(run, by_hand)


def test_the_record_tells_both_parts_as_one_run():
    run = fit(fm.PostTrain(pretrain_steps=6, interval=3), steps=10)
    assert [(r.index, r.start, r.end) for r in run.rounds] == [(1, 0, 3), (2, 3, 6), (3, 6, 9), (4, 9, 10)]
    assert [list(r.branches) for r in run.rounds] == [["joint"], ["joint"], ["alone"], ["alone"]]
    assert run.relevance == {"tgt": 1.0, "aux": 0.6, "odd": 0.6}
    assert (run.algorithm, run.steps, run.seed) == ("PostTrain", 10, 0)
    assert run.seconds["train"] > 0
    assert run.settings["algorithm"]["pretrain_steps"] == 6


@pytest.mark.parametrize(
    ("stop", "refit"), [(1, False), (2, False), (3, False), (4, False), (1, True), (3, True), (5, True), (6, True)]
)
def test_a_run_stopped_anywhere_ends_with_the_same_bits(tmp_path, stop, refit):
    algorithm = fm.PostTrain(interval=2, refit=refit)  # two segments of either part, and of the first part's refit
    whole = fit(algorithm, net=noisy_net, steps=8)
    seen = []

    def observe(event):
        seen.append(event)
        if sum(isinstance(item, StepProgress) for item in seen) == stop:
            raise Stopped

    with pytest.raises(Stopped):
        fit(algorithm, net=noisy_net, steps=8, folder=tmp_path / "run", on_event=observe)
    assert status(tmp_path / "run") == "interrupted"
    again = fit(algorithm, net=noisy_net, steps=8, folder=tmp_path / "run", resume=True)
    assert_same_run(again, whole)


@pytest.mark.parametrize(("pretrain_steps", "steps"), [(12, 12), (0, 12), (None, 1), (2.0, 12)])
def test_parts_without_a_step_are_refused_before_anything_is_written(tmp_path, pretrain_steps, steps):
    with pytest.raises(fm.ProblemError, match="pretrain_steps must leave both parts at least one"):
        fit(fm.PostTrain(pretrain_steps=pretrain_steps), steps=steps, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_module_given_is_trained_in_place():
    model = seeded(plain_net)
    run = fit(fm.PostTrain(), net=model)
    assert run.model is model


def test_a_target_with_several_metrics_is_fine():
    metrics = {"loss": lambda p, t: 1.0 + (p**2).mean().item(), "accuracy": lambda p, t: 0.5 + fm.accuracy(p, t)}
    run = fit(fm.PostTrain(), shared_problem(metrics=metrics))
    assert set(run.metrics) == {"loss", "accuracy"}


def test_the_test_split_is_never_read():
    problem = shared_problem(test=fm.Evaluation(Untouchable(), fm.accuracy), validation=evaluation())
    fit(fm.PostTrain(refit=True), problem)


def test_a_recipe_file_can_name_it():
    made = algorithm_from({"name": "PostTrain", "pretrain_steps": 3, "refit": True}, fm.ForkMerge("mixed"))
    assert made == fm.PostTrain(pretrain_steps=3, refit=True)


def test_the_weights_of_the_first_part_can_be_given():
    weighted = fit(fm.PostTrain(task_weights=EQUAL))
    assert_same_bits(weighted, fit(fm.PostTrain()))
    assert_other_bits(weighted, fit(fm.PostTrain(task_weights={"tgt": 1.0, "aux": 0.1})))


def test_a_schedule_in_shares_of_the_steps_is_that_of_each_part():
    def decay(milestone: int | str) -> fm.SchedulerOf:
        return fm.SchedulerOf("MultiStepLR", milestones=[milestone], gamma=0.1)

    by_hand = start()
    fit(fm.Joint(interval=2, select="best"), net=by_hand, steps=6, scheduler=decay(3))
    fit(fm.SingleTask(interval=2), net=by_hand, steps=4, seed=derive(0, "fine-tuning"), scheduler=decay(2))
    run = fit(fm.PostTrain(pretrain_steps=6, interval=2), net=start(), steps=10, scheduler=decay("50%"))
    assert_same_bits(run, by_hand)
    whole = fit(fm.PostTrain(pretrain_steps=6, interval=2), net=start(), steps=10, scheduler=decay(5))
    assert_other_bits(run, whole)


COSINE = fm.SchedulerOf("CosineAnnealingLR", T_max="100%")


def one_training(steps: int, joint: int, net=noisy_net):
    """Two trainings of one segment each, by the loop itself, with everything carried over."""
    problem, training = shared_problem(), Training(ADAM, COSINE).over(steps)
    binding = training.binding(seeded(net))
    state = binding.initial()
    for weights, count in ((EQUAL, joint), ({"tgt": 1.0}, steps - joint)):
        train_branch(binding, problem, Mixture("joint", weights), state, steps=count, training=training, seed=0)
    binding.release(state)
    return binding.model


@pytest.mark.parametrize(("steps", "alone", "joint"), [(10, 0.5, 5), (10, 0.3, 7), (11, 0.5, 5), (2, 0.5, 1)])
def test_joint_then_alone_is_one_training_whose_schedule_and_optimizer_go_on(steps, alone, joint):
    run = fit(fm.JointThenAlone(alone), net=seeded(noisy_net), steps=steps, optimizer=ADAM, scheduler=COSINE)
    assert_same_bits(run, one_training(steps, joint))
    assert (run.algorithm, run.final, len(run.rounds)) == ("JointThenAlone", "last step", 1)


def test_joint_then_alone_is_not_post_training():
    options = {"steps": 10, "optimizer": ADAM, "scheduler": COSINE}
    apart = fit(fm.PostTrain(), net=seeded(noisy_net), **options)
    assert_other_bits(fit(fm.JointThenAlone(), net=seeded(noisy_net), **options), apart)


def test_joint_then_alone_returns_the_best_of_both_parts_if_asked():
    wild = fm.OptimizerOf("SGD", lr=4.0)
    run = fit(fm.JointThenAlone(select="best", interval=1), optimizer=wild, steps=8)
    every = [fit(fm.Joint(interval=1), optimizer=wild, steps=count).score for count in range(1, 5)]
    assert run.score >= max(every) > fit(fm.JointThenAlone(), optimizer=wild, steps=8).score
    assert run.final == "best validation"


def test_joint_then_alone_is_refitted_to_the_step_that_was_best():
    run = fit(fm.JointThenAlone(select="best", interval=2, refit=True), steps=8)
    (searched, again) = run.rounds
    assert (run.final, again.phase) == ("refit", "refit")
    assert searched.branches["joint"].entered_step == again.branches["joint"].entered_step


@pytest.mark.parametrize("refit", [False, True])
def test_joint_then_alone_stopped_anywhere_ends_with_the_same_bits(tmp_path, refit):
    algorithm = fm.JointThenAlone(select="best", interval=2, refit=refit)
    whole = fit(algorithm, net=noisy_net, steps=8)
    for stop in (1, 3, 5):
        seen = []

        def observe(event, seen=seen, stop=stop):
            seen.append(event)
            if sum(isinstance(item, StepProgress) for item in seen) == stop:
                raise Stopped

        folder = tmp_path / str(stop)
        with pytest.raises(Stopped):
            fit(algorithm, net=noisy_net, steps=8, folder=folder, on_event=observe, checkpoint_every=1)
        assert_same_run(fit(algorithm, net=noisy_net, steps=8, folder=folder, resume=True), whole)


@pytest.mark.parametrize("alone", [0, 1, 1.5, True, "half"])
def test_a_share_that_is_none_is_refused(alone):
    with pytest.raises(fm.ProblemError, match="alone must be a share of the steps between 0 and 1"):
        fm.JointThenAlone(alone)


def test_the_rounds_of_the_first_part_are_no_choice_that_select_could_have_made():
    """`select` is among the rounds of the fine-tuning: a better score before it is nothing to advise upon."""
    run = fit(fm.PostTrain(pretrain_steps=4, interval=2), net=start(), steps=8)
    assert [r.phase for r in run.rounds] == ["pretraining"] * 2 + ["search"] * 2
    best = replace(run.rounds[0], score=10.0)
    assert replace(run, rounds=[best, *run.rounds[1:]]).remarks == run.remarks
    fell = [replace(r, score=score) for r, score in zip(run.rounds, (10.0, 0.5, 0.9, 0.4), strict=True)]
    (remark,) = replace(run, rounds=fell).remarks
    assert "fell from 0.9 at step 6 to 0.4 at the last step" in remark
