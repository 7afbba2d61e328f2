"""Gradient cosines and single steps, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

import forkmerge as fm
from forkmerge.analysis import conflict
from problems import Point, noisy_net, plain_net, quadratic_problem, seeded, shared_problem

CENTRES = {"tgt": (1.0, 0.0), "one": (1.0, 1.0), "two": (-1.0, 0.5)}


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
