"""MGDA: the shortest convex combination, exact or truncated, of gradients normalised or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import forkmerge as fm
from _asserts import assert_close
from forkmerge.methods import MGDA
from forkmerge.problem import example_order
from forkmerge.testing import MethodConformance
from gradient_twins import declared_losses, double_data, double_problem, doubled, train_with
from method_steps import GRADIENTS, assert_first_direction, step, view
from problems import TASKS, fit, plain_net, seeded


def test_the_truncated_mgda_comes_near() -> None:
    np.testing.assert_allclose(-step(MGDA(solver="frank_wolfe"))[0], (-1 / 17, -4 / 17), atol=0.01)


def test_mgda_may_normalise() -> None:
    """With unit gradients the weights do not depend on the scale of a task."""
    gramian, scale = GRADIENTS @ GRADIENTS.T, np.array([1.0, 10.0, 0.1])
    plain = MGDA(normalize="l2").weights(gramian, view([1.0] * 3), {})
    scaled = MGDA(normalize="l2").weights(gramian * scale * scale[:, None], view([1.0] * 3), {})
    np.testing.assert_allclose(plain, scaled, rtol=1e-9)
    by_loss = MGDA(normalize="loss").weights(gramian * scale * scale[:, None], view(scale), {})
    np.testing.assert_allclose(by_loss, MGDA().weights(gramian, view([1.0] * 3), {}), rtol=1e-9)


class TestMGDA(MethodConformance):
    method = MGDA


def test_the_direction_of_the_first_step() -> None:
    assert_first_direction(MGDA(), (-1 / 17, -4 / 17))  # the nearest point to 0 between g_m and g_b


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "l1"}, "normalize must be none, l2, loss or loss\\+, got 'l1'"),
        ({"solver": "fast"}, "solver must be exact or frank_wolfe, got 'fast'"),
    ],
)
def test_wrong_options_are_refused_when_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        MGDA(**options)


class TestAuthorsScripts:
    """Truncated, at the representation, whose gradients are summed over the batch."""

    def test_a_step_is_the_plain_formula(self) -> None:
        """Two tasks: w = ⟨g_2 − g_1, g_2⟩/‖g_1 − g_2‖², clipped to [0, 1], with g_k = Σ_b ∂L_k/∂z_b."""
        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        optimizer, weights = fm.OptimizerOf("SGD", lr=0.3), {"tgt": 1.0, "aux": 1.0}
        train_with(ours, double_problem(declared_losses), MGDA.authors_scripts(), optimizer=optimizer, weights=weights)
        used, (inputs, labels) = optimizer(theirs), double_data().tensors
        for at in range(4):
            chosen = example_order.batch_indices(16, 8, at, 0, "all")
            used.zero_grad()
            made = theirs.body(inputs[chosen])
            leaf = made.detach().requires_grad_()
            losses = [cross_entropy(theirs.heads[t](leaf), labels[chosen, TASKS.index(t)]) for t in weights]
            one, other = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in losses)
            torch.stack(losses).sum().backward()
            apart = other.sum(0) - one.sum(0)
            share = ((apart @ other.sum(0)) / (apart @ apart)).clamp(0, 1)
            made.backward(share * one + (1 - share) * other)
            used.step()
        assert_close(ours, theirs, rtol=1e-4)

    def test_a_problem_that_declares_no_representation_is_told_what_to_write(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"gradients='summed_representation' needs .*context\.shared"):
            fit(fm.Joint(method="authors_scripts:MGDA"))
        assert fit(fm.Joint(method="authors_scripts:MGDA(gradients='parameters')"), steps=1).model is not None
