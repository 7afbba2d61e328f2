"""Relative changes, paired intervals against scipy, and what happens at the edges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forkmerge as fm
from forkmerge.experiments.paired_statistics import (
    Paired,
    Spread,
    compare_paired,
    relative_change,
    spread,
    t_quantile,
)


def test_the_sign_follows_the_direction_also_for_negative_metrics():
    assert relative_change({"m": -0.5}, {"m": -1.0}, {"m": 1}) == pytest.approx(0.5)
    assert relative_change({"m": 0.5}, {"m": 1.0}, {"m": -1}) == pytest.approx(0.5)


def test_several_metrics_count_alike_each_relative_to_its_own_reference():
    directions = {"accuracy": 1, "error": -1, "score": 1}
    ours = {"accuracy": 55.0, "error": 3.0, "score": -3.0, "other": 9.0}
    theirs = {"accuracy": 50.0, "error": 4.0, "score": -2.0}
    assert relative_change(ours, theirs, directions) == pytest.approx((0.1 + 0.25 - 0.5) / 3)


def test_a_relative_change_that_does_not_exist_is_nan():
    for value, reference in [(1.0, 0.0), (math.nan, 1.0), (1.0, math.inf), (math.inf, 1.0), (-math.inf, 1.0)]:
        assert math.isnan(relative_change({"m": value}, {"m": reference}, {"m": 1}))
        # Neither does the mean of several, of which the others are finite or not finite in the other direction.
        both = {"m": value, "n": -value}
        assert math.isnan(relative_change(both, {"m": reference, "n": 2.0}, {"m": 1, "n": 1}))


def test_missing_values_are_named():
    message = r"^a relative change lacks a value: unknown metric 'accuracy'. Did you mean 'acuracy'"
    with pytest.raises(fm.ProblemError, match=message):
        relative_change({"acuracy": 1.0}, {"accuracy": 1.0}, {"accuracy": 1})


def test_t_quantiles_agree_with_scipy():
    scipy = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 4, 9, 30, 101):
        assert t_quantile(0.5, freedom) == pytest.approx(0.0, abs=1e-12)
        for probability in (0.6, 0.9, 0.975, 0.9995):
            assert t_quantile(probability, freedom) == pytest.approx(scipy.t.ppf(probability, freedom), rel=1e-10)
            assert t_quantile(1 - probability, freedom) == -t_quantile(1 - (1 - probability), freedom)


def test_impossible_quantiles_are_refused_with_what_arrived():
    for probability, freedom in [(0.0, 3), (1.0, 3), (-0.1, 3), (0.9, 0)]:
        with pytest.raises(fm.ProblemError, match=rf"^t_quantile takes .*, got {probability}, {freedom}\.$"):
            t_quantile(probability, freedom)


def test_a_paired_interval_agrees_with_scipy():
    scipy = pytest.importorskip("scipy.stats")
    ours, theirs = dict(enumerate([0.81, 0.78, 0.84, 0.80, 0.79])), dict(enumerate([0.80, 0.79, 0.80, 0.77, 0.79]))
    for confidence in (0.95, 0.5):
        paired = compare_paired(ours, theirs, confidence)
        expected = scipy.ttest_rel(list(ours.values()), list(theirs.values())).confidence_interval(confidence)
        assert (paired.low, paired.high) == pytest.approx((expected.low, expected.high))
        assert (paired.wins, paired.ties, paired.losses) == (3, 1, 1)
        assert paired.count == 5
    assert compare_paired(ours, theirs) == compare_paired(ours, theirs, 0.95)


def test_two_seeds_have_an_interval():
    assert spread([1.0, 3.0]) == Spread(2.0, pytest.approx(math.sqrt(2)), 2)
    paired = compare_paired({0: 1.0, 1: 3.0}, {0: 0.0, 1: 0.0})
    assert paired.high - paired.mean == pytest.approx(t_quantile(0.975, 1))
    assert paired.mean - paired.low == pytest.approx(t_quantile(0.975, 1))


def test_only_shared_seeds_are_paired():
    paired = compare_paired({0: 1.0, 1: 2.0, 2: 3.0}, {1: 1.0, 2: 1.0, 7: 9.0})
    assert (paired.mean, paired.count) == (1.5, 2)
    assert compare_paired({0: 1.0}, {1: 1.0}) is None


def test_one_seed_has_no_interval():
    assert compare_paired({3: 1.0}, {3: 0.5}) == Paired(0.5, None, None, 1, 0, 0)
    assert spread([0.5]) == Spread(0.5, None, 1)


def test_what_is_not_finite_has_no_spread():
    assert spread([0.5, math.inf]) == Spread(math.inf, None, 2)
    assert spread([0.5, -math.inf]) == Spread(-math.inf, None, 2)
    for values in ([0.5, math.nan], [math.inf, -math.inf]):
        assert math.isnan(spread(values).mean)
        assert spread(values).std is None
    for bad in (math.nan, math.inf, -math.inf):
        paired = compare_paired({0: 1.0, 1: bad}, {0: 0.5, 1: 0.5})
        assert (paired.low, paired.high) == (None, None)


def test_equal_differences_are_no_certainty():
    assert compare_paired({0: 0.75, 1: 0.5}, {0: 0.5, 1: 0.25}) == Paired(0.25, None, None, 2, 0, 0)


def test_rounding_is_a_tie_and_every_seed_counts_once():
    paired = compare_paired({0: 0.1 + 0.2, 1: 1.0}, {0: 0.3, 1: 1.0})
    assert (paired.wins, paired.ties, paired.losses) == (0, 2, 0)
    # 1e-12 is the largest difference that counts as rounding.
    paired = compare_paired({0: 1e-12, 1: -1e-12, 2: 2e-12, 3: -2e-12}, dict.fromkeys(range(4), 0.0))
    assert (paired.wins, paired.ties, paired.losses) == (1, 2, 1)


def test_nothing_has_no_mean():
    with pytest.raises(fm.ProblemError, match=r"^there is no value to take the mean of\.$"):
        spread([])


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.floats(-100, 100))
def test_pairing_cancels_what_a_seed_does_to_both(values, gain):
    theirs = dict(enumerate(values))
    paired = compare_paired({seed: value + gain for seed, value in theirs.items()}, theirs)
    assert paired.mean == pytest.approx(gain, abs=1e-9)
    assert paired.low is paired.high is None
