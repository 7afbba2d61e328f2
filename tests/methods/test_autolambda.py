"""Auto-λ: weights that look one step of the optimizer ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import forkmerge as fm
from forkmerge.methods import AutoLambda, Method
from forkmerge.testing import MethodConformance
from method_steps import CENTRES, GRADIENTS, first_moments, step


class TestAutoLambdaOnValidation(MethodConformance):
    def make(self) -> Method:
        return AutoLambda(look_at="validation")


def test_auto_lambda_looks_one_step_ahead() -> None:
    theta, own, _ = step(AutoLambda())
    # θ' = (.1, .15) and d = (−.9, .15); the first moment of Adam is a tenth of the gradient.
    np.testing.assert_allclose(10 * first_moments(own), [-0.9, -0.75, 0.975], rtol=1e-9)
    np.testing.assert_allclose(own["weights"], [0.1001, 0.1001, 0.0999], rtol=1e-6)
    np.testing.assert_allclose(-theta, own["weights"].numpy() @ GRADIENTS, rtol=1e-12)


def test_auto_lambda_may_look_at_validation_data() -> None:
    _, own, _ = step(AutoLambda(look_at="validation"), goal=(0.1, 0.15 - 2.0))
    # d = (0, 2) there.
    np.testing.assert_allclose(10 * first_moments(own), GRADIENTS @ [0.0, -2.0], atol=1e-9)


def test_auto_lambda_takes_momentum_and_weight_decay_along() -> None:
    """The second virtual step, by hand."""
    method, options = AutoLambda(lr=0.0), {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.2}
    theta, _, _ = step(method, **options)
    _, own, _ = step(method, steps=2, **options)
    slopes = theta - np.array(list(CENTRES.values()))
    descent = 0.1 * slopes.sum(0) + 0.2 * theta + 0.9 * (-theta / 0.5)
    ahead = theta - 0.5 * descent - [1.0, 0.0]
    first = 0.1 * -0.5 * (GRADIENTS @ (0.1 * GRADIENTS.sum(0) * -0.5 - [1.0, 0.0]))
    np.testing.assert_allclose(first_moments(own), 0.9 * first + 0.1 * -0.5 * (slopes @ ahead), rtol=1e-9)


class TestAutoLambda(MethodConformance):
    method = AutoLambda


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"look_at": "test"}, "look_at must be second or validation, got 'test'"),
    ],
)
def test_wrong_options_are_refused_when_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        AutoLambda(**options)
