"""Transfer gain, its verdict and its matrix, checked by direct computation."""

from __future__ import annotations

import math
import random

import pytest

from forkmerge.analysis import advice, shift, transfer
from forkmerge.analysis.results import TransferCurve


def gain(weight, *gains):
    return transfer.transfer_gain(dict(enumerate(gains)), dict.fromkeys(range(len(gains)), 0.0), weight)


def test_a_transfer_gain_is_the_paired_difference_with_students_interval():
    found = transfer.transfer_gain({0: 0.7, 1: 0.9, 2: 0.8, 9: 0.0}, {2: 0.5, 0: 0.6, 1: 0.7}, 0.25)
    assert found.gains == pytest.approx((0.1, 0.2, 0.3))
    assert found.mean == pytest.approx(0.2)
    half = 4.302653 * 0.1 / math.sqrt(3)  # t of 2 degrees of freedom
    assert (found.low, found.high) == pytest.approx((0.2 - half, 0.2 + half), abs=1e-6)


NEGATIVE, POSITIVE, NOISE = (-0.11, -0.1, -0.09), (0.09, 0.1, 0.11), (-0.5, 0.0, 0.5)
FAIR = (0.05, 0.1, 0.12)  # above 0 with 95%, not with 97.5%


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ({0.25: NEGATIVE, 1.0: NEGATIVE}, "strong negative"),
        ({0.25: POSITIVE, 1.0: NEGATIVE}, "weak negative"),
        ({0.25: NOISE, 1.0: NEGATIVE}, "weak negative"),
        ({0.25: NOISE, 1.0: FAIR}, "not enough evidence"),  # λ = 1 is one of two
        ({0.25: NEGATIVE, 1.0: FAIR}, "weak negative"),
        ({0.25: POSITIVE, 1.0: NOISE}, "positive"),
        ({0.25: NOISE, 1.0: NOISE}, "not enough evidence"),
        ({1.0: (-0.1,)}, "not enough evidence"),
        ({1.0: NEGATIVE}, "weak negative"),
        ({0.25: (-0.1, -0.1), 1.0: (-0.1, -0.1, -0.1)}, "not enough evidence"),
        ({0.25: (-0.11, -0.1, math.nan), 1.0: NEGATIVE}, "weak negative"),
    ],
)
def test_a_verdict_follows_the_definitions_as_far_as_intervals_show_it(gains, verdict):
    assert transfer.judge([gain(weight, *values) for weight, values in gains.items()]) == verdict


def test_a_run_that_diverged_is_as_bad_as_can_be_and_has_no_interval():
    for bad in (math.nan, math.inf, -math.inf):
        found = transfer.transfer_gain({0: 0.7, 1: bad, 2: 0.6}, dict.fromkeys(range(3), 0.5), 1.0)
        assert (found.mean, found.low, found.high) == (-math.inf, None, None)
    alone = transfer.transfer_gain({0: 0.7, 1: 0.6}, {0: 0.5, 1: math.nan}, 1.0)
    assert math.isnan(alone.mean)
    assert alone.low is None
    curve = transfer.transfer_curve(
        {0.5: {0: math.nan, 1: 0.5}, 1.0: {0: 0.1, 1: 0.2}}, {0: 0.4, 1: 0.4}, target="t", auxiliary="a"
    )
    assert curve.best.weight == 1
    assert TransferCurve.from_json(curve.to_json()).best.weight == 1
    shifted = shift.shift_curve({0.0: {0: 0.1, 1: 0.2}, 1.0: {0: math.nan, 1: 0.4}}, curve)
    assert shifted.points[1].std is None
    assert math.isnan(shifted.change(1.0))
    assert shifted.change(0.5) is None


def test_some_weight_of_many_must_pass_a_stricter_interval_than_a_single_one():
    fair = gain(0.25, *FAIR)
    assert transfer.judge([fair]) == "positive"
    assert transfer.judge([*(gain(w, *NOISE) for w in (0.1, 0.2, 0.3, 0.4)), fair]) == "not enough evidence"


def test_what_one_weight_shows_makes_it_easier_for_the_others():
    """Holm: with one of two decided, the other is asked with 95%."""
    assert transfer.shown_effects([gain(0.25, *NEGATIVE), gain(1.0, *FAIR)]) == {0.25: -1, 1.0: 1}
    assert transfer.shown_effects([gain(0.25, *NOISE), gain(1.0, *FAIR)]) == {0.25: 0, 1.0: 0}


@pytest.mark.parametrize("seeds", [3, 6])
@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_an_auxiliary_that_does_nothing_gets_a_verdict_or_advice_in_at_most_5_percent_of_cases(seeds, shared):
    """Scores of the target alone and at five λ have the same mean; those at all λ of a seed share some noise."""
    draw = random.Random(seeds).gauss
    cases, verdicts, advised = 1500, 0, 0
    for _ in range(cases):
        baseline = {seed: draw(0, 1) for seed in range(seeds)}
        common = {seed: draw(0, 1) for seed in range(seeds)}
        scores = {
            weight: {
                seed: math.sqrt(shared) * noise + math.sqrt(1 - shared) * draw(0, 1) for seed, noise in common.items()
            }
            for weight in transfer.WEIGHTS
        }
        curve = transfer.transfer_curve(scores, baseline, target="t", auxiliary="a")
        verdicts += curve.verdict != "not enough evidence"
        advised += advice.advise(curve, None)[0] != "no difference shown"
    bound = 0.05 + 3 * math.sqrt(0.05 * 0.95 / cases)  # three standard errors of the simulation
    assert verdicts / cases <= bound
    assert advised / cases <= bound


def test_several_metrics_are_scored_against_single_task_means():
    directions = {"accuracy": 1, "error": -1}
    baseline = {0: {"accuracy": 0.5, "error": 2.0}, 1: {"accuracy": 0.7, "error": 2.0}}
    scores = transfer.scores_of({0: {"accuracy": 0.9, "error": 1.0}}, baseline, directions)
    assert scores[0] == pytest.approx((0.3 / 0.6 + 0.5) / 2)
    assert transfer.scores_of(baseline, baseline, {"accuracy": 1})[1] == 0.7
