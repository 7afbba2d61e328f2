"""RLW: random weights in every step."""

from __future__ import annotations

from typing import Any

import pytest

import forkmerge as fm
from forkmerge.methods import RLW
from forkmerge.testing import MethodConformance
from method_steps import by_losses, view


@pytest.mark.parametrize("distribution", ["normal", "uniform", "dirichlet"])
def test_rlw_draws_weights_that_sum_to_one(distribution: Any) -> None:
    method = RLW(distribution)
    drawn = [by_losses(method, view([1.0] * 3, at), {}) for at in (0, 1, 0)]
    assert all((w > 0).all() and w.sum() == pytest.approx(1.0) for w in drawn)
    assert drawn[0].tolist() == drawn[2].tolist() != drawn[1].tolist()


class TestRLW(MethodConformance):
    method = RLW


def test_a_distribution_that_does_not_exist_is_refused() -> None:
    with pytest.raises(fm.ProblemError, match="distribution must be normal, uniform or dirichlet, got 'cauchy'"):
        RLW("cauchy")
