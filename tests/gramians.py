"""Gradients to make Gramians of, for the tests of the solvers, and the shortest vector in their hull."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from scipy.optimize import nnls

TASKS = (1, 2, 3, 8, 40)
# g_m, g_1, g_2 of the quadratics ½‖θ − c_i‖² at 0 that the reference values are given for.
FIXTURE = np.array([[-1.0, 0.0], [-1.0, -1.0], [1.0, -0.5]])


def make_rng(*key: int) -> np.random.Generator:
    return np.random.default_rng([2024, *key])


def make_orders(rng: np.random.Generator, tasks: int) -> np.ndarray:
    return np.stack([rng.permutation(tasks) for _ in range(tasks)])


def regular_gradients(rng: np.random.Generator, tasks: int) -> np.ndarray:
    """Independent gradients, conflicting or not, of norms within two decades, at any scale."""
    gradients = rng.standard_normal((tasks, tasks + int(rng.integers(2, 60))))
    gradients += rng.choice([0.0, 0.5, 2.0]) * rng.standard_normal(gradients.shape[1])
    gradients *= 10 ** rng.uniform(-1, 1, (tasks, 1))
    return gradients * 10 ** rng.uniform(-8, 8)


def dependent_gradients(rng: np.random.Generator, tasks: int) -> np.ndarray:
    """Dependent gradients: too few dimensions, copies, opposites."""
    kind = int(rng.integers(4))
    gradients = rng.standard_normal((tasks, max(1, tasks // 2) if kind == 0 else tasks + 5))
    if kind != 1:  # kind 0 in the open, the others around a common direction
        gradients += rng.choice([0.0, 3.0]) * rng.standard_normal(gradients.shape[1])
    if kind:
        gradients[0] = gradients[-1] * (-2.0 if kind == 1 else rng.choice([1.0, 0.5, 3.0]))
    if kind == 3:
        gradients[tasks // 2] = gradients[[0, -1]].mean(axis=0)
    return gradients * 10 ** rng.uniform(-8, 8)


def shortest_weights(gradients: np.ndarray) -> np.ndarray:
    """MGDA's weights by scipy's active-set solver on the gradients themselves, not on their Gramian."""
    scale = np.linalg.norm(gradients, axis=1).min()
    matrix = np.vstack([gradients.T / scale, np.ones(len(gradients))])
    weights, _ = nnls(matrix, np.append(np.zeros(gradients.shape[1]), 1.0), maxiter=1000)
    return weights / weights.sum()


def count_calls(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[int]:
    """Count the calls of a module's function from now on: the length of the list that is returned."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: calls.append(1) or function(*arguments))
    return calls
