"""GradNorm: weights that bring gradients to a common size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import forkmerge as fm
from forkmerge.methods import GradNorm, Method
from forkmerge.testing import MethodConformance
from method_steps import assert_first_direction, step, view


def test_gradnorm_moves_weights_towards_a_common_size_and_keeps_their_sum() -> None:
    _, own, _ = step(GradNorm())
    moved = np.array([1.025, 0.975, 1.025])  # norms 1, √2 and √1.25 around their mean
    np.testing.assert_allclose(own["weights"], moved * 3 / moved.sum(), rtol=1e-6)
    assert own["first"] == [0.5, 1.0, 0.625]


def test_gradnorm_asks_slow_tasks_for_larger_gradients() -> None:
    method = GradNorm(alpha=1.0, lr=0.1)
    state = {**method.start(view([1.0, 1.0]).setup), "first": [1.0, 1.0]}
    # Rates 0.5 and 1.5 of a mean of 1: goals ½ and 3/2 for gradients of size 1.
    method.weights(np.eye(2), view([0.5, 1.5]), state)
    np.testing.assert_allclose(state["weights"], [0.9, 1.1], rtol=1e-6)


class TestGradNorm(MethodConformance):
    method = GradNorm


def test_the_first_step_is_the_sum() -> None:
    assert_first_direction(GradNorm(), (-1.0, -1.5))


class TestAuthorsScripts(MethodConformance):
    """LibMTL's form: w = K softmax(s), the first losses those of the first epoch, heads unweighted."""

    def make(self) -> Method:
        return replace(GradNorm.authors_scripts(), gradients="parameters")  # the small problem declares nothing

    def test_it_is_the_plain_formula_over_many_steps(self) -> None:
        method, draw = GradNorm(lr=0.3, softmax=True), torch.Generator().manual_seed(0)
        state = method.start(view([1.0] * 3, epoch=3).setup)
        scales = torch.ones(3, dtype=torch.float64, requires_grad=True)
        adam, first = torch.optim.Adam([scales], lr=0.3), []
        for at in range(12):
            losses, rows = torch.rand(3, generator=draw).double() + 0.1, torch.randn(3, 4, generator=draw).double()
            used = method.weights((rows @ rows.T).numpy(), view(losses.tolist(), at, epoch=3), state)
            if at < 3:
                first.append(losses)
                np.testing.assert_array_equal(used, np.ones(3))
                continue
            weights = 3 * torch.softmax(scales, 0)
            np.testing.assert_allclose(used, weights.detach(), rtol=1e-7)
            sizes = (weights[:, None] * rows).norm(dim=1)
            rates = losses / torch.stack(first).mean(0)
            goals = (sizes.mean() * (rates / rates.mean()) ** 1.5).detach()
            adam.zero_grad()
            (sizes - goals).abs().sum().backward()
            adam.step()

    def test_heads_stay_as_they_are(self) -> None:
        assert GradNorm.authors_scripts().head_weights(np.ones(3), view([1.0] * 3), {}) is None

    def test_it_follows_the_models_rate_at_the_representation_summed_over_the_batch(self) -> None:
        method = GradNorm.authors_scripts()
        assert (method.lr, method.gradients) == (None, "summed_representation")


def test_an_unknown_place_to_compare_at_is_refused() -> None:
    with pytest.raises(fm.ProblemError, match=r"gradients must be parameters, representation, .* got 'features'"):
        GradNorm(gradients="features")
