"""Confidence score discrepancies over λ, and draws from the interpolated distribution."""

from __future__ import annotations

from functools import partial

import pytest

import forkmerge as fm
from forkmerge.analysis import shift, transfer


def test_discrepancies_stand_beside_gains_and_change_against_the_target_alone():
    curve = transfer.transfer_curve({1.0: {0: 0.5, 1: 0.6}}, {0: 0.6, 1: 0.8}, target="t", auxiliary="a")
    found = shift.shift_curve({0.0: {0: 0.1, 1: 0.3}, 1.0: {0: 0.4, 1: 0.4}}, curve)
    assert found.change(1.0) == pytest.approx(0.2)
    assert [point.gain for point in found.points] == pytest.approx([0.0, -0.15])
    with pytest.raises(fm.ProblemError, match="no transfer gain"):
        shift.shift_curve({0.5: {0: 0.1}}, curve)


def test_the_interpolated_distribution_takes_auxiliary_points_with_bernoullis_share():
    draw = partial(shift.interpolate, 30, 5, count=20000)
    for weight in (0.0, 0.25, 1.0):
        is_auxiliary, indices = draw(weight=weight)
        assert is_auxiliary.double().mean().item() == pytest.approx(weight / (1 + weight), abs=0.01)
        assert int(indices[~is_auxiliary].max()) < 30
        if weight:
            assert sorted(set(indices[is_auxiliary].tolist())) == [0, 1, 2, 3, 4]
