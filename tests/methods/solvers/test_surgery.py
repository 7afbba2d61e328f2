"""PCGrad and GradVac against the same corrections made on real vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forkmerge.methods.solvers import gradvac, pcgrad
from gramians import TASKS, dependent_gradients, make_orders, make_rng, regular_gradients


def _project(gradients: np.ndarray, order: np.ndarray) -> np.ndarray:
    corrected = gradients.copy()
    for i, row in enumerate(order):
        for j in row:
            product = corrected[i] @ gradients[j]
            if j != i and product < 0:
                corrected[i] -= product / (gradients[j] @ gradients[j]) * gradients[j]
    return corrected.sum(axis=0)


def _vaccinate(gradients: np.ndarray, order: np.ndarray, goals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    corrected, observed = gradients.copy(), goals.copy()
    for i, row in enumerate(order):
        for j in row:
            if j == i:
                continue
            own, other = np.linalg.norm(corrected[i]), np.linalg.norm(gradients[j])
            cosine, goal = corrected[i] @ gradients[j] / own / other, goals[i, j]
            observed[i, j] = cosine
            if cosine < goal:
                lift = goal * np.sqrt(1 - cosine**2) - cosine * np.sqrt(1 - goal**2)
                corrected[i] += own * lift / (other * np.sqrt(1 - goal**2)) * gradients[j]
    return corrected.sum(axis=0), observed


@pytest.mark.parametrize("tasks", TASKS)
def test_pcgrad_is_the_sum_of_projected_vectors(tasks):
    for case in range(10):
        rng = make_rng(tasks, case)
        gradients = regular_gradients(rng, tasks) if case % 2 else dependent_gradients(rng, tasks)
        order = make_orders(rng, tasks)
        largest = np.abs(gradients).max()
        direction = pcgrad(gradients @ gradients.T, order) @ gradients
        np.testing.assert_allclose(direction, _project(gradients, order), rtol=0, atol=1e-10 * largest)
        target = int(rng.integers(tasks))
        own = gradients[target] / np.linalg.norm(gradients[target])
        expected = gradients - np.minimum(gradients @ own, 0)[:, None] * own
        direction = pcgrad(gradients @ gradients.T, target=target) @ gradients
        np.testing.assert_allclose(direction, expected.sum(axis=0), rtol=0, atol=1e-10 * largest)


@pytest.mark.parametrize("tasks", TASKS)
def test_gradvac_is_the_sum_of_vaccinated_vectors(tasks):
    for case in range(10):
        rng = make_rng(tasks, case)
        gradients = regular_gradients(rng, tasks)
        order, goals = make_orders(rng, tasks), rng.uniform(-0.5, 0.7, (tasks, tasks))
        weights, observed = gradvac(gradients @ gradients.T, order, goals)
        expected, cosines = _vaccinate(gradients, order, goals)
        np.testing.assert_allclose(weights @ gradients, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
        np.testing.assert_allclose(observed, cosines, atol=1e-10)


def test_target_aware_gradvac_corrects_each_auxiliary_towards_the_target_alone():
    rng = make_rng(12)
    gradients, goals = regular_gradients(rng, 4), rng.uniform(-0.5, 0.7, (4, 4))
    weights, observed = gradvac(gradients @ gradients.T, None, goals, target=1)
    expected, cosines = _vaccinate(gradients, np.full((4, 1), 1), goals)
    np.testing.assert_allclose(weights @ gradients, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    np.testing.assert_allclose(observed, cosines, atol=1e-12)
    assert (np.delete(weights, 1) == 1).all()


def test_gradvac_with_goals_of_zero_is_pcgrad():
    rng = make_rng(13)
    gradients, order = regular_gradients(rng, 6), make_orders(rng, 6)
    gramian = gradients @ gradients.T
    np.testing.assert_allclose(gradvac(gramian, order, np.zeros((6, 6)))[0], pcgrad(gramian, order), rtol=1e-10)


def test_gradvac_survives_opposite_gradients_and_goals_of_one():
    gradients = np.array([[1.0, 0.0], [-2.0, 0.0], [1.0, 1.0]])
    for goal in (-1.0, 0.0, 1.0):
        weights, observed = gradvac(gradients @ gradients.T, None, np.full((3, 3), goal))
        assert np.isfinite(weights).all()
        assert (np.abs(observed) <= 1).all()


def test_gradvac_meets_parallel_gradients_whose_cosine_rounding_carries_past_one():
    for case in range(200):
        rng = make_rng(case)
        gradients = np.outer(rng.uniform(0.1, 10, 4) * rng.choice([-1, 1], 4), rng.standard_normal(3))
        weights, observed = gradvac(gradients @ gradients.T, make_orders(rng, 4), rng.uniform(-0.9, 0.9, (4, 4)))
        assert np.isfinite(weights).all()
        assert np.abs(observed).max() <= 1


def test_gradvac_leaves_a_pair_whose_cosine_is_its_goal_or_above():
    gradients = np.array([[1.0, 0.0], [1.0, 1.0]])
    weights, observed = gradvac(gradients @ gradients.T, None, np.full((2, 2), np.sqrt(0.5) - 1e-3))
    np.testing.assert_array_equal(weights, [1, 1])
    np.testing.assert_allclose(observed[[0, 1], [1, 0]], np.sqrt(0.5))


def test_pcgrad_and_gradvac_are_those_of_torchjd():
    aggregation = pytest.importorskip("torchjd.aggregation")
    gradvac_there, goals = aggregation.GradVacWeighting(beta=0.5, eps=0.0), np.zeros((4, 4))
    for case in range(20):
        gradients = make_rng(case).standard_normal((4, 9))
        gramian = gradients @ gradients.T
        tensor = torch.tensor(gramian, dtype=torch.float64)
        with torch.random.fork_rng():
            torch.manual_seed(case)
            expected = aggregation.PCGradWeighting()(tensor).numpy()
            torch.manual_seed(case)
            order = torch.stack([torch.randperm(4) for _ in range(4)]).numpy()
            np.testing.assert_allclose(pcgrad(gramian, order), expected, rtol=1e-12)
            torch.manual_seed(case)
            expected = gradvac_there(tensor).numpy()
            torch.manual_seed(case)
            others = [np.delete(np.arange(4), i)[torch.randperm(3).numpy()] for i in range(4)]
        order = np.stack([np.append(row, i) for i, row in enumerate(others)])
        weights, observed = gradvac(gramian, order, goals)
        np.testing.assert_allclose(weights, expected, rtol=1e-9)
        goals = 0.5 * goals + 0.5 * observed
