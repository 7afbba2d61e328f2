"""Combinations of models, and the loss along lines and planes between them."""

from __future__ import annotations

import pytest
import torch

import forkmerge as fm
from forkmerge.analysis import combinations
from problems import (
    Point,
    quadratic_problem,
)

PLANE = {"a": (0.0, 0.0), "b": (2.0, 0.0), "c": (1.0, 3.0)}


def at(*theta):
    return {"theta": torch.tensor(theta, dtype=torch.float64)}


def states():
    return {name: at(*theta) for name, theta in PLANE.items()}


def loss(x, y, goal=(1.0, 0.5)):
    return 0.5 * ((x - goal[0]) ** 2 + (y - goal[1]) ** 2)


PROBLEM = quadratic_problem({"tgt": (5.0, 5.0), "aux": (0.0, 0.0)}, (1.0, 0.5))


def test_gains_of_a_triangle_are_those_of_the_merged_models():
    model = Point((9.0, 9.0))
    found = combinations.combination_gains(model, PROBLEM, states(), resolution=4)
    assert len(found.coefficients) == 15
    assert model.theta.tolist() == [9.0, 9.0]
    for (a, b, c), gain in zip(found.coefficients, found.gains, strict=True):
        assert a + b + c == pytest.approx(1)
        assert gain == pytest.approx(loss(0, 0) - loss(2 * b + c, 3 * c))
    assert found.coefficients[found.best] == (0.5, 0.25, 0.25)  # of two that are as near to the goal the first


def test_a_line_of_two_models_ends_in_both():
    two = {name: states()[name] for name in ("a", "b")}
    found = combinations.combination_gains(Point(), PROBLEM, two, resolution=2)
    assert found.coefficients == ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0))
    with pytest.raises(fm.ProblemError, match="two or three"):
        combinations.combination_gains(Point(), PROBLEM, {"a": at(0.0, 0.0)})


def test_the_loss_along_a_line_has_a_barrier_only_where_it_rises_above_its_ends():
    two = {"a": at(0.0, 0.0), "b": at(2.0, 0.0)}
    found = combinations.loss_line(Point(), PROBLEM, two, points=5)
    assert found.positions == pytest.approx((0, 0.25, 0.5, 0.75, 1))
    # The loss is measured on validation examples by the target's own loss, here the distance to the goal.
    assert found.losses == pytest.approx([loss(2 * p, 0) for p in found.positions])
    assert found.barrier == 0
    assert found.scores == pytest.approx([-value for value in found.losses])


def test_the_plane_through_three_models_has_their_distances_and_the_right_losses():
    found = combinations.loss_plane(
        Point(), PROBLEM, states(), marks={"merge": {"a": 0.2, "b": 0.3, "c": 0.5}}, points=3
    )
    assert [v for corner in found.corners for v in corner] == pytest.approx([0, 0, 2, 0, 1, 3])
    assert found.marks["merge"] == pytest.approx((0.3 * 2 + 0.5, 1.5))
    for y, row in zip(found.ys, found.losses, strict=True):
        assert row == pytest.approx([loss(x, y) for x in found.xs])
    with pytest.raises(fm.ProblemError, match="lie on a line"):
        combinations.loss_plane(Point(), PROBLEM, {"a": at(0.0, 0.0), "b": at(1.0, 1.0), "c": at(2.0, 2.0)})
