"""DWA: tasks that fall slowly count more."""

from __future__ import annotations

import numpy as np

from forkmerge.methods import DWA
from forkmerge.testing import MethodConformance
from method_steps import assert_first_direction, by_losses, view


def test_dwa_compares_the_last_two_epochs() -> None:
    method = DWA()
    state = method.start(view([1.0, 1.0]).setup)
    for at, losses in enumerate([(3.0, 4.0), (1.0, 4.0), (1.0, 5.0), (1.0, 3.0)]):
        assert by_losses(method, view(losses, at), state).tolist() == [1.0, 1.0]
    weights = by_losses(method, view([9.0, 9.0], 4), state)
    powers = np.exp(np.array([0.5, 1.0]) / 2)
    np.testing.assert_allclose(weights, 2 * powers / powers.sum(), rtol=1e-12)


class TestDWA(MethodConformance):
    method = DWA


def test_the_first_step_is_the_sum() -> None:
    assert_first_direction(DWA(), (-1.0, -1.5))
