"""Transfer gain, gradient conflict and distribution shift, checked by direct computation."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch

import forkmerge as fm
from compare_problem import recipe
from forkmerge.analysis import conflict, heldout, shift, studies, transfer, transfer_runs
from forkmerge.analysis.results import TransferCurve
from problems import Point, domains_problem, evaluation, noisy_net, plain_net, quadratic_problem, seeded, shared_problem

CENTRES = {"tgt": (1.0, 0.0), "one": (1.0, 1.0), "two": (-1.0, 0.5)}


def gain(weight, *gains):
    return transfer.transfer_gain(dict(enumerate(gains)), dict.fromkeys(range(len(gains)), 0.0), weight)


def test_a_transfer_gain_is_the_paired_difference_with_students_interval():
    found = transfer.transfer_gain({0: 0.7, 1: 0.9, 2: 0.8, 9: 0.0}, {2: 0.5, 0: 0.6, 1: 0.7}, 0.25)
    assert found.gains == pytest.approx((0.1, 0.2, 0.3))
    assert found.mean == pytest.approx(0.2)
    half = 4.302653 * 0.1 / math.sqrt(3)  # t of 2 degrees of freedom
    assert (found.low, found.high) == pytest.approx((0.2 - half, 0.2 + half), abs=1e-6)


NEGATIVE, POSITIVE, NOISE = (-0.11, -0.1, -0.09), (0.09, 0.1, 0.11), (-0.5, 0.0, 0.5)


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ({0.25: NEGATIVE, 1.0: NEGATIVE}, "strong negative"),
        ({0.25: POSITIVE, 1.0: NEGATIVE}, "weak negative"),
        ({0.25: NOISE, 1.0: NEGATIVE}, "weak negative"),
        ({0.25: POSITIVE, 1.0: NOISE}, "positive"),
        ({0.25: NOISE, 1.0: NOISE}, "not enough evidence"),
        ({1.0: (-0.1,)}, "not enough evidence"),
        ({1.0: NEGATIVE}, "weak negative"),
        ({0.25: (-0.1, -0.1), 1.0: (-0.1, -0.1, -0.1)}, "not enough evidence"),
        ({0.25: (-0.11, -0.1, math.nan), 1.0: NEGATIVE}, "weak negative"),
    ],
)
def test_a_verdict_follows_the_definitions_as_far_as_intervals_show_it(gains, verdict):
    assert transfer.judge([gain(weight, *values) for weight, values in gains.items()]) == verdict


def test_a_run_that_diverged_is_as_bad_as_can_be_and_has_no_interval():
    for bad in (math.nan, math.inf, -math.inf):
        found = transfer.transfer_gain({0: 0.7, 1: bad, 2: 0.6}, dict.fromkeys(range(3), 0.5), 1.0)
        assert (found.mean, found.low, found.high) == (-math.inf, None, None)
    alone = transfer.transfer_gain({0: 0.7, 1: 0.6}, {0: 0.5, 1: math.nan}, 1.0)
    assert math.isnan(alone.mean)
    assert alone.low is None
    curve = transfer.transfer_curve(
        {0.5: {0: math.nan, 1: 0.5}, 1.0: {0: 0.1, 1: 0.2}}, {0: 0.4, 1: 0.4}, target="t", auxiliary="a"
    )
    assert curve.best.weight == 1
    assert TransferCurve.from_json(curve.to_json()).best.weight == 1
    shifted = shift.shift_curve({0.0: {0: 0.1, 1: 0.2}, 1.0: {0: math.nan, 1: 0.4}}, curve)
    assert shifted.points[1].std is None
    assert math.isnan(shifted.change(1.0))
    assert shifted.change(0.5) is None


def test_some_weight_of_many_must_pass_a_stricter_interval_than_a_single_one():
    fair = gain(0.25, 0.05, 0.1, 0.12)  # above 0 with 95%, not with 99%
    assert transfer.judge([fair]) == "positive"
    assert transfer.judge([*(gain(w, *NOISE) for w in (0.1, 0.2, 0.3, 0.4)), fair]) == "not enough evidence"


def test_several_metrics_are_scored_against_single_task_means():
    directions = {"accuracy": 1, "error": -1}
    baseline = {0: {"accuracy": 0.5, "error": 2.0}, 1: {"accuracy": 0.7, "error": 2.0}}
    scores = transfer.scores_of({0: {"accuracy": 0.9, "error": 1.0}}, baseline, directions)
    assert scores[0] == pytest.approx((0.3 / 0.6 + 0.5) / 2)
    assert transfer.scores_of(baseline, baseline, {"accuracy": 1})[1] == 0.7


def test_measured_gains_are_those_of_runs_done_by_hand():
    curves = studies.measure_transfer(recipe, ["aux"], weights=(0.5, 1.0), seeds=(0, 1), split="test", steps=4)
    by_hand = {}
    for seed in (0, 1):
        r = recipe(seed)
        for weight in (0.0, 0.5):
            algorithm = fm.Joint({"tgt": 1.0, "aux": weight} if weight else {"tgt": 1.0}, interval=2)
            run = algorithm.fit(r.problem, model=r.model, optimizer=r.optimizer, steps=4, seed=seed, threads=1)
            by_hand[seed, weight] = fm.measure(run.model, r.problem.evaluations("test")["tgt"], seed=seed)
    base = {name: (by_hand[0, 0.0][name] + by_hand[1, 0.0][name]) / 2 for name in ("accuracy", "loss")}
    for seed, found in zip((0, 1), curves["aux"].at(0.5).gains, strict=True):
        ours, theirs = by_hand[seed, 0.5], by_hand[seed, 0.0]
        up = (ours["accuracy"] - theirs["accuracy"]) / base["accuracy"]
        down = (ours["loss"] - theirs["loss"]) / base["loss"]
        assert found == pytest.approx((up - down) / 2)
    assert curves["aux"].seeds == (0, 1)


def test_measured_discrepancies_are_those_of_runs_done_by_hand():
    given = {"weights": (0.5, 1.0), "seeds": (0, 1), "steps": 4}
    found = studies.measure_shift(recipe, ["aux"], **given)["aux"]
    assert [point.weight for point in found.points] == [0.0, 0.5, 1.0]
    curve = studies.measure_transfer(recipe, ["aux"], **given)["aux"]
    assert [point.gain for point in found.points[1:]] == [gain.mean for gain in curve.points]
    for seed in (0, 1):
        r = recipe(seed)
        run = fm.Joint({"tgt": 1.0, "aux": 0.5}, interval=2).fit(
            r.problem, model=r.model, optimizer=r.optimizer, steps=4, seed=seed, threads=1
        )
        expected = heldout.confidence_discrepancy(run.model, r.problem.target_validation)
        assert found.points[1].discrepancies[seed] == pytest.approx(expected)


def test_a_task_without_test_data_or_confidences_is_told_so():
    with pytest.raises(fm.ProblemError, match="pass split='validation'"):
        studies.measure_matrix({"tgt": partial(recipe, test=False)}, seeds=(0,), steps=2)
    with pytest.raises(fm.ProblemError, match="no class scores"):
        studies.measure_shift(point_recipe, weights=(1.0,), seeds=(0,), steps=1)


def point_recipe(seed):
    return fm.Recipe(quadratic_problem(CENTRES, (5.0, -3.0)), Point, fm.OptimizerOf("SGD", lr=0.1), steps=1)


def test_a_run_that_was_sent_to_another_process_gives_the_same_result():
    source = transfer_runs.SeededSource(fm.load_recipe("compare_problem:recipe").source, "aux")
    run = transfer_runs.TransferRun(source, 1, "odd", 0.5, steps=3, maker=transfer_runs.forkmerge)
    here, sent = transfer_runs.do_transfer_runs([run, pickle.loads(pickle.dumps(run))])
    assert here.to_json() | {"seconds": 0} == sent.to_json() | {"seconds": 0}
    assert here.steps == 3
    assert set(here.relevance) == {"aux", "odd"}
    assert len(here.coefficients) == 2  # Δt is shortened like the run


def test_the_recipes_own_forkmerge_is_measured_with_other_branches():
    reference = {"accuracy": 0.5, "loss": 1.0}
    options = {"bn": "recompute", "checkpoint": "best_in_interval", "validate_every": 3, "prune_to": 2}
    search = fm.Fixed((0.5, 0.5))
    own = fm.ForkMerge(interval=3, search=search, reference=reference, refit=True, keep_branches=True, **options)
    mine = replace(recipe(), algorithm=own)
    pair = transfer_runs.forkmerge(mine, "aux", 0.5)
    assert {name: getattr(pair, name) for name in options} == options
    assert (pair.search, pair.reference, pair.refit, pair.keep_branches) == (search, reference, False, False)
    assert [dict(m.task_weights) for m in pair.constructor.build(mine.problem)] == [{"tgt": 1}, {"tgt": 1, "aux": 0.5}]
    assert (
        transfer_runs.forkmerge(mine, transfer_runs.EVERY, 1.0).search is None
    )  # two coefficients cannot merge three branches
    other = replace(mine, problem=mine.problem.with_target("aux"))
    assert transfer_runs.forkmerge(other, "tgt", 1.0).reference is None
    assert transfer_runs.forkmerge(replace(mine, algorithm=fm.Joint(select="best")), "aux", 1.0).select == "best"
    assert transfer_runs.shortened(mine, 2).algorithm == replace(own, interval=1, validate_every=1)


def test_half_of_a_run_has_the_rates_of_the_whole_and_ends_with_its_last_weights():
    schedule = fm.SchedulerOf("CosineAnnealingLR", T_max="100%")
    whole = replace(recipe(), options={"scheduler": schedule}, algorithm=fm.ForkMerge(interval=1, select="best"))
    half = transfer_runs.halfway(whole, 6)
    found = transfer_runs.fit_transfer_run(transfer_runs.TransferRun(recipe, 0), half)
    rest = {"model": whole.model, "optimizer": whole.optimizer, "seed": 0, "threads": 1}
    expected = fm.SingleTask().fit(whole.problem, steps=3, scheduler=schedule.over(6), **rest)
    annealed = fm.SingleTask().fit(whole.problem, steps=3, scheduler=schedule, **rest)
    assert half.steps == found.steps == 3
    weights, same, other = (run.model.state_dict() for run in (found, expected, annealed))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not all(torch.equal(weights[name], other[name]) for name in weights)


def test_the_matrix_has_a_gain_for_every_pair_and_none_on_its_diagonal():
    source = fm.load_recipe("compare_problem:recipe").source
    recipes = {task: transfer_runs.SeededSource(source, task) for task in ("tgt", "aux")}
    matrix = studies.measure_matrix(recipes, seeds=(0, 1), steps=2)
    assert (matrix.auxiliaries, matrix.targets) == (("aux", "odd", "tgt"), ("tgt", "aux"))
    missing = [[cell is None for cell in row] for row in matrix.cells]
    assert missing == [[False, True], [False, False], [True, False]]
    assert matrix.split == "test"
    ours, alone = (
        transfer_runs.do_transfer_run(transfer_runs.TransferRun(recipes["aux"], 0, a, w, steps=2, test=True))
        for a, w in (("odd", 1.0), ("", 0.0))
    )
    gains = matrix.cells[1][1].gains
    assert gains[0] == pytest.approx(alone.metrics["test"]["loss"] - ours.metrics["test"]["loss"])


def test_gradient_cosines_have_the_values_known_for_quadratics():
    problem = quadratic_problem(CENTRES, (0.0, 0.0))
    found = conflict.measure_similarity(Point(), problem, "tgt", ["one", "two"], count=3)
    assert found["one"].cosines == pytest.approx([0.70711] * 3, abs=1e-5)
    assert found["two"].mean == pytest.approx(-0.89443, abs=1e-5)
    assert found["two"].conflicts == 1


def test_gradient_cosines_are_taken_on_shared_parameters_and_leave_the_model_alone():
    model, problem = seeded(noisy_net), shared_problem()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = conflict.measure_similarity(model.eval(), problem, "tgt", ["aux"], count=2)["aux"]
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    gradients = next(conflict.task_gradients(model, problem, ["tgt", "aux"], count=1))
    body = len(list(model.body.parameters()))
    flat = [torch.cat([g.flatten() for g in gradients[task][:body]]) for task in ("tgt", "aux")]
    assert found.cosines[0] == pytest.approx(torch.cosine_similarity(*flat, dim=0).item(), abs=1e-6)


def test_feeds_are_closed_when_a_loss_fails(monkeypatch):
    closed = []

    def feed(*arguments):
        try:
            while True:
                yield None
        finally:
            closed.append(True)

    monkeypatch.setattr(conflict, "batches", feed)
    gradients = conflict.task_gradients(seeded(plain_net), shared_problem(), ["tgt"], count=2)
    with pytest.raises(TypeError) as failed:  # there is no batch to unpack
        next(gradients)
    assert closed, failed


def test_a_zero_gradient_has_no_cosine():
    problem = quadratic_problem({"tgt": (1.0, 0.0), "one": (0.0, 0.0)}, (0.0, 0.0))
    found = conflict.measure_similarity(Point(), problem, "tgt", ["one"], count=2)["one"]
    assert (found.cosines, found.skipped) == ((), 2)
    assert math.isnan(found.mean)


def test_one_step_gains_are_those_of_the_closed_form():
    goal, rate = (0.3, 0.7), 0.5
    problem, model = quadratic_problem(CENTRES, goal), Point((0.2, -0.1))
    found = conflict.one_step_gains(model, problem, "two", weights=(0.25, 1.0), rate=rate, count=2)
    theta, centre, other = (torch.tensor(v, dtype=torch.float64) for v in ((0.2, -0.1), CENTRES["tgt"], CENTRES["two"]))

    def score(weight):
        moved = theta - rate * ((theta - centre) + weight * (theta - other))
        return -0.5 * (moved - torch.tensor(goal, dtype=torch.float64)).square().sum().item()

    for point in found.points:
        assert point.gains == pytest.approx([score(0.25) - score(0), score(1.0) - score(0)])
    assert model.theta.tolist() == [0.2, -0.1]
    assert found.fits == ((), ())  # all batches are one
    assert found.correlations == (None, None)


def test_l2_takes_the_place_of_an_auxiliary_and_loss_that_of_a_score():
    problem, model = fm.with_l2(shared_problem(metrics=fm.accuracy)), seeded(plain_net)
    found = conflict.one_step_gains(model, problem, "l2", weights=(1.0,), rate=0.1, count=6, measure_by="loss")
    assert len(found.points) == 6
    assert any(point.gains[0] != 0 for point in found.points)
    assert len(found.fits[0]) == 4


def test_a_cubic_is_found_again():
    x = [-0.9, -0.5, -0.1, 0.2, 0.6, 0.8]
    fit = conflict.fit_cubic(x, [1 - 2 * v + 0.5 * v**2 + 3 * v**3 for v in x])
    assert fit == pytest.approx((1, -2, 0.5, 3))
    assert conflict.correlation(x, [2 * v + 1 for v in x]) == pytest.approx(1)


def test_csd_is_one_minus_the_mean_largest_softmax():
    model, held = seeded(plain_net), evaluation(metrics=fm.accuracy, batch_size=7)
    inputs, _ = held.dataset.tensors
    expected = 1 - model(inputs).softmax(1).amax(1).mean().item()
    assert heldout.confidence_discrepancy(model, held) == pytest.approx(expected, abs=1e-6)


def test_confidences_of_probabilities_and_of_binary_probabilities():
    rows = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    assert heldout.class_confidence(rows, torch.tensor([0, 1])).tolist() == pytest.approx([0.8, 0.5])
    binary = heldout.class_confidence(torch.tensor([0.1, 0.7]), torch.tensor([0.0, 1.0]))
    assert binary.tolist() == pytest.approx([0.9, 0.7])
    with pytest.raises(fm.ProblemError, match="pass confidence="):
        heldout.class_confidence(torch.randn(4, 3), torch.randn(4, 3))


def test_the_loss_on_validation_examples_is_the_streams_own():
    model, problem = seeded(plain_net), domains_problem()
    inputs, labels = problem.target_validation.dataset.tensors
    expected = torch.nn.functional.cross_entropy(model(inputs), labels[:, 0]).item()
    assert heldout.heldout_loss(model, problem) == pytest.approx(expected, abs=1e-6)
    assert heldout.reads_heldout(model, problem)


def test_discrepancies_stand_beside_gains_and_change_against_the_target_alone():
    curve = transfer.transfer_curve({1.0: {0: 0.5, 1: 0.6}}, {0: 0.6, 1: 0.8}, target="t", auxiliary="a")
    found = shift.shift_curve({0.0: {0: 0.1, 1: 0.3}, 1.0: {0: 0.4, 1: 0.4}}, curve)
    assert found.change(1.0) == pytest.approx(0.2)
    assert [point.gain for point in found.points] == pytest.approx([0.0, -0.15])
    with pytest.raises(fm.ProblemError, match="no transfer gain"):
        shift.shift_curve({0.5: {0: 0.1}}, curve)


def test_the_interpolated_distribution_takes_auxiliary_points_with_bernoullis_share():
    draw = partial(shift.interpolate, 30, 5, count=20000)
    for weight in (0.0, 0.25, 1.0):
        is_auxiliary, indices = draw(weight=weight)
        assert is_auxiliary.double().mean().item() == pytest.approx(weight / (1 + weight), abs=0.01)
        assert int(indices[~is_auxiliary].max()) < 30
        if weight:
            assert sorted(set(indices[is_auxiliary].tolist())) == [0, 1, 2, 3, 4]
