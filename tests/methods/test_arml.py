"""ARML: weights that shift, clamp and shake as its paper says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import forkmerge as fm
from forkmerge.engine.training.branch import train_branch
from forkmerge.methods import ARML, Method
from forkmerge.methods._arml import FreeARML
from forkmerge.testing import MethodConformance
from method_steps import GRADIENTS, assert_first_direction, first_moments, step, view
from problems import Point, quadratic_problem


class TestOftenMovedARML(MethodConformance):
    def make(self) -> Method:
        return ARML(every=2, temperature=1e-4)


def test_arml_shifts_and_clamps() -> None:
    _, own, _ = step(ARML(every=1))
    np.testing.assert_allclose(own["weights"], [1.0, 1.0625, 0.9375], rtol=1e-12)


def test_arml_moves_every_twentieth_step_only() -> None:
    assert step(ARML(), steps=19, lr=0.01)[1]["weights"].tolist() == [1.0, 1.0, 1.0]
    assert step(ARML(), steps=20, lr=0.01)[1]["weights"].tolist() != [1.0, 1.0, 1.0]


def test_the_noise_of_arml_has_the_size_of_langevin_dynamics() -> None:
    jumps = [step(ARML(temperature=0.5), {"m": (0.0, 0.0), "a": (0.0, 0.0)}, lr=0.04, steps=1)[0]]
    many = fm.Training(optimizer=fm.OptimizerOf("SGD", lr=0.04), method=ARML(temperature=0.5))
    problem = quadratic_problem({"m": (0.0, 0.0), "a": (0.0, 0.0)}, (0.0, 0.0))
    for seed in range(150):
        binding = many.binding(Point())
        mixture = fm.Mixture("b", {"m": 1.0, "a": 1.0})
        result = train_branch(binding, problem, mixture, binding.initial(), steps=1, training=many, seed=seed)
        jumps.append(result.state.rows["float64"].numpy()[:2])
    assert np.std(jumps) == pytest.approx(np.sqrt(2 * 0.5 * 0.04), rel=0.15)


class TestARML(MethodConformance):
    method = ARML


def test_the_direction_of_the_first_step() -> None:
    assert_first_direction(ARML(every=1), np.array([1.0, 1.0625, 0.9375]) @ GRADIENTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a positive integer, got 0"),
        ({"temperature": -1}, "temperature must not be negative, got -1"),
    ],
)
def test_wrong_options_are_refused_when_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        ARML(**options)


class TestAuthorsScripts(MethodConformance):
    """A step of Adam on ‖g_m − Σ a_k g_k‖² in every step, without a sum to keep or a bound."""

    def make(self) -> Method:
        return ARML.authors_scripts()

    def test_the_first_step_is_the_sum_and_weights_move_against_their_gradient(self) -> None:
        theta, own, _ = step(ARML.authors_scripts(), lr=0.1)
        np.testing.assert_allclose(-theta / 0.1, GRADIENTS.sum(0), rtol=1e-12)
        np.testing.assert_allclose(own["weights"], [1.0, 0.9, 0.9], rtol=1e-6)  # the gradient is (1, 3.5)
        np.testing.assert_allclose(first_moments(own), [0.0, 0.1, 0.35], rtol=1e-12)

    def test_it_is_the_plain_formula_over_many_steps(self) -> None:
        method, draw = FreeARML(lr=0.3), torch.Generator().manual_seed(0)
        state = method.start(view([1.0] * 3).setup)
        plain = torch.ones(3, dtype=torch.float64, requires_grad=True)
        adam = torch.optim.Adam([plain], lr=0.3)
        for at in range(12):
            rows = torch.randn(3, 4, generator=draw, dtype=torch.float64)
            used = method.weights((rows @ rows.T).numpy(), view([1.0] * 3, at), state)
            np.testing.assert_allclose(used, [1.0, *plain.detach()[1:]], rtol=1e-9)
            adam.zero_grad()
            (rows[0] - plain[1] * rows[1] - plain[2] * rows[2]).square().sum().backward()
            adam.step()
        assert min(used) < 0, "nothing bounds the weights"

    def test_heads_stay_as_they_are(self) -> None:
        assert FreeARML().head_weights(np.ones(3), view([1.0] * 3), {}) is None
