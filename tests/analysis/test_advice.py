"""Cheap estimates of what an auxiliary does, and the advice that follows from them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from compare_problem import recipe
from forkmerge.analysis import advice
from forkmerge.analysis.transfer import transfer_curve

GOOD, BAD = (0.09, 0.1, 0.11), (-0.09, -0.1, -0.11)


def curve(*gains, weight=1.0):
    seeds = range(len(gains))
    return transfer_curve(
        {weight: dict(zip(seeds, gains, strict=True))}, dict.fromkeys(seeds, 0.0), target="t", auxiliary="a"
    )


def test_a_probe_costs_at_most_its_share():
    problem = recipe().problem  # one stream for all tasks: a pair costs as much as the target alone
    for share in (0.05, 0.1, 0.2):
        settings = advice.probe_settings(problem, 1000, share)
        batches = settings.prefix + settings.steps * (1 + 2)  # the target alone and with each of two auxiliaries
        assert 0.9 * share <= batches / (3 * 1000) <= share


def test_a_probe_compares_branches_of_one_trunk_on_the_same_batches():
    r = recipe(0)
    trials = advice.probe(r, advice.ProbeSettings(3, 2), seed=0)
    assert [trial.auxiliary for trial in trials] == ["aux", "odd"]
    (same,) = [t.effect for t in advice.probe(r, advice.ProbeSettings(3, 2), seed=0) if t.auxiliary == "aux"]
    assert same == trials[0].effect
    harmless = advice.probe(r, advice.ProbeSettings(3, 2, (1e-12,)), seed=0)
    assert all(abs(trial.effect) < 1e-6 for trial in harmless)


def test_affinity_is_the_mean_over_seeds_and_a_diverged_trial_is_as_bad_as_can_be():
    trials = [advice.ShortRun("a", 1.0, seed, value) for seed, value in enumerate((0.1, 0.2, 0.3))]
    assert advice.affinity(trials, "a").mean == pytest.approx(0.2)
    assert advice.affinity([*trials, advice.ShortRun("a", 1.0, 3, math.nan)], "a").is_negative


@pytest.mark.parametrize(
    ("gains", "effects", "advised"),
    [
        ((0.09, 0.1, 0.11), (-0.5, -0.5), "use"),
        ((-0.09, -0.1, -0.11), (0.5, 0.5), "drop"),
        ((-0.5, 0.0, 0.6), (0.5, 0.51), "try"),
        ((-0.6, 0.0, 0.5), (-0.5, -0.51), "down-weight"),
        ((-0.6, 0.0, 0.5), (0.5, 0.51), "no difference shown"),
        ((-0.1, 1e-16, 0.1), (-0.1, 0.2), "no difference shown"),
    ],
)
def test_advice_follows_full_training_and_else_what_both_estimates_agree_on(gains, effects, advised):
    trials = [advice.ShortRun("a", 1.0, seed, value) for seed, value in enumerate(effects)]
    found, reason = advice.advise(curve(*gains), advice.affinity(trials, "a"))
    assert found == advised
    assert reason


def curve_over(gains):
    scores = {weight: dict(enumerate(values)) for weight, values in gains.items()}
    return transfer_curve(scores, dict.fromkeys(range(3), 0.0), target="t", auxiliary="a")


@pytest.mark.parametrize(
    ("gains", "advised", "reason"),
    [
        ({0.25: BAD, 1.0: BAD}, "drop", "it hurts at every λ that was tried"),
        ({0.25: GOOD, 1.0: BAD}, "down-weight", "it hurts at λ = 1, and the mean gain at λ = 0.25 is positive"),
        ({0.25: BAD, 1.0: GOOD}, "use", "it helps at λ = 1"),
        ({0.25: BAD, 1.0: (-0.5, 0.1, 0.5)}, "no difference shown", "the runs show no clear effect"),
        ({0.25: GOOD, 1.0: (-0.5, 0.0, 0.4)}, "down-weight", "helps at a smaller λ than 1, and no gain shows at λ = 1"),
        ({0.25: GOOD, 1.0: (-0.4, 0.0, 0.5)}, "use", "helps at a smaller λ than 1, and leans towards"),
        ({0.25: BAD, 1.0: (-0.5, 0.0, 0.4)}, "drop", "it hurts at some λ, and no λ that was tried has a positive"),
        ({1.0: BAD}, "drop", "it hurts at λ = 1, and no λ that was tried has a positive mean gain"),
        ({0.25: GOOD, 1.0: (0.1, math.nan, 0.1)}, "down-weight", "training with it diverged at λ = 1, and the mean"),
    ],
)
def test_advice_says_of_the_plain_sum_only_what_its_own_gains_show(gains, advised, reason):
    found, why = advice.advise(curve_over(gains), None)
    assert found == advised
    assert reason in why


def test_shortened_runs_leave_the_advice_to_the_probe():
    bad = curve_over({0.25: BAD, 1.0: BAD})
    assert advice.advise(bad, None, is_whole=False)[0] == "no difference shown"
    better, worse = (advice.Affinity("a", m, m - 0.1, m + 0.1) for m in (0.2, -0.2))
    assert advice.advise(bad, better, is_whole=False)[0] == "try"
    assert advice.advise(bad, worse, is_whole=False)[0] == "down-weight"
    leaning = advice.advise(bad, replace(worse, high=0.1), is_whole=False)
    assert leaning == ("down-weight", "short trials lean against it, though not beyond doubt")
    slight = advice.Affinity("a", -0.01, -0.1, 0.1)
    assert advice.advise(bad, slight, is_whole=False)[0] == "no difference shown"
    word, reason = advice.advise(curve_over({1.0: GOOD}), replace(better, low=-0.1), is_whole=False)
    assert (word, reason.split(",")[0]) == ("no difference shown", "shortened runs show a gain")
    leaning = advice.advise(curve(0.3, -0.1, 0.2), replace(better, low=-0.1), is_whole=False)
    assert leaning == ("no difference shown", "runs and short trials lean towards it, but not beyond noise")


def test_an_auxiliary_is_used_only_where_whole_runs_show_a_gain_beyond_noise():
    leaning = (0.3, -0.1, 0.2)  # positive on average, and its interval holds zero
    for effects in ((0.5, 0.51, 0.52), (0.5, -0.3, 0.4), (-0.01, 0.01, 0.02)):
        trials = [advice.ShortRun("a", 1.0, seed, value) for seed, value in enumerate(effects)]
        for is_whole in (True, False):
            assert advice.advise(curve(*leaning), advice.affinity(trials, "a"), is_whole=is_whole)[0] != "use"
    assert advice.advise(curve(*leaning), None)[0] == "no difference shown"
    assert advice.advise(curve(*GOOD), None)[0] == "use"
    assert advice.advise(curve(*GOOD), None, is_whole=False)[0] == "no difference shown"


def test_a_score_is_judged_relative_to_itself_and_without_the_tolerance_of_losses(monkeypatch):
    monkeypatch.setattr(advice, "reads_heldout", lambda *rest: False)
    one = recipe(0).problem.with_target("aux")
    scores = iter([-2.0, -2.0, -2.5, -2.4, -1.0, -1.0])
    monkeypatch.setattr(advice, "measure", lambda *rest, **options: {"loss": -next(scores)})
    trials = advice.probe(replace(recipe(0), problem=one), advice.ProbeSettings(3, 2), seed=0)
    assert [trial.effect for trial in trials] == pytest.approx([-0.225, 0.5])
    assert {trial.measure for trial in trials} == {"score"}
    small = advice.affinity(
        [advice.ShortRun("a", 1.0, s, e, "score") for s, e in enumerate((-0.01, -0.02, -0.015))], "a"
    )
    assert advice.advise(None, small) == (
        "down-weight",
        "short trials with it worsen the target's score on validation data",
    )
