"""Probes: short runs that are scored before the branches can be built."""

from __future__ import annotations

from typing import Any

import pytest

import forkmerge as fm
from _asserts import assert_same_bits
from forkmerge.algorithms.events import ProbeScored
from problems import fit, noisy_net


def test_a_probe_is_a_short_joint_run_scored_on_validation_and_leaves_the_model_alone() -> None:
    events: list[Any] = []
    run = fit(fm.ForkMerge(fm.NestedTopK(probe_steps=3), interval=4), net=noisy_net, on_event=events.append)
    probes = [event for event in events if isinstance(event, ProbeScored)]
    assert {event.branch: event.score for event in probes} == run.probes
    assert [event.step for event in probes] == [3, 3]
    for task, score in run.probes.items():
        short = fit(fm.Joint({"tgt": 1.0, task: 1.0}), net=noisy_net, steps=3)
        assert score == pytest.approx(short.score)
    ranked = sorted(run.probes, key=lambda task: -run.probes[task])
    given = {"alone": {"tgt": 1.0}, "top 1": {"tgt": 1.0, ranked[0]: 1.0}}
    given["top 2"] = {**given["top 1"], ranked[1]: 1.0}
    assert_same_bits(run, fit(fm.ForkMerge(given, interval=4), net=noisy_net))
