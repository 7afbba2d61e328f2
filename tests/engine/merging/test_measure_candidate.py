"""A combination of states is measured exactly as it would be installed."""

from __future__ import annotations

import math

import pytest
import torch

import forkmerge as fm
from branch_states import TRAINING, make_branches
from forkmerge.engine.merging.batchnorm_policy import recompute_statistics
from forkmerge.engine.merging.blend import blend_weights
from forkmerge.engine.merging.measure_candidate import Measurement, MeasureRequest, measure_candidate
from problems import minus_loss, shared_problem

THIRDS = (0.5, 0.3, 0.2)


@pytest.fixture(scope="module")
def problem() -> fm.Problem:
    return shared_problem(metrics={"nll": fm.nll, "accuracy": fm.accuracy})


def measured(problem: fm.Problem, request: MeasureRequest) -> Measurement:
    binding, branches = make_branches(3)
    return measure_candidate(binding, problem, branches, request, branches[0].weights(), training=TRAINING, seed=5)


def test_metrics_are_those_of_the_blend(problem: fm.Problem) -> None:
    binding, branches = make_branches(3)
    for coefficients in (THIRDS, (0.0, 1.0, 0.0)):
        measurement = measured(problem, MeasureRequest(coefficients))
        binding.attach_weights(blend_weights(binding, branches, coefficients, branches[0].weights()))
        assert measurement.metrics == fm.measure(binding.model, problem.target_validation, seed=5)
        assert measurement.costs is not None
        assert len(measurement.costs.costs) == 24
        assert 0 < measurement.seconds < 60


def test_a_sub_sample_has_metrics_but_no_costs(problem: fm.Problem) -> None:
    binding, branches = make_branches(3)
    measurement = measured(problem, MeasureRequest(THIRDS, indices=(1, 4, 9)))
    binding.attach_weights(blend_weights(binding, branches, THIRDS, branches[0].weights()))
    expected = fm.measure(binding.model, problem.target_validation, indices=(1, 4, 9), seed=5)
    assert measurement.metrics == expected
    assert measurement.costs is None
    assert measured(shared_problem(metrics=minus_loss), MeasureRequest(THIRDS)).costs is None  # it does not add up


def test_statistics_are_recomputed_for_a_combination_but_not_for_a_branch(problem: fm.Problem) -> None:
    binding, branches = make_branches(3)
    blend = blend_weights(binding, branches, THIRDS, branches[0].weights())
    recompute_statistics(binding, blend, problem, training=TRAINING, seed=5, count=2)
    binding.attach_weights(blend)
    expected = fm.measure(binding.model, problem.target_validation, seed=5)
    assert measured(problem, MeasureRequest(THIRDS, batches=2)).metrics == expected
    assert measured(problem, MeasureRequest(THIRDS, batches=1)).metrics != expected
    assert measured(problem, MeasureRequest(THIRDS)).metrics != expected
    alone = MeasureRequest((0.0, 0.0, 1.0), batches=2)
    assert measured(problem, alone).metrics == measured(problem, MeasureRequest((0.0, 0.0, 1.0))).metrics


def test_weights_that_are_not_finite_have_no_metrics(problem: fm.Problem) -> None:
    for bad in (math.nan, math.inf):
        binding, branches = make_branches(2)
        branches[1].rows["float32"][3] = bad
        options = {"training": TRAINING, "seed": 5}
        spoilt = measure_candidate(
            binding, problem, branches, MeasureRequest((0.5, 0.5)), branches[0].weights(), **options
        )
        assert (spoilt.metrics, spoilt.costs) == (None, None)
        whole = measure_candidate(
            binding, problem, branches, MeasureRequest((1.0, 0.0)), branches[0].weights(), **options
        )
        assert whole.metrics is not None


def test_the_branches_stay_as_they_are(problem: fm.Problem) -> None:
    binding, branches = make_branches(3)
    before = [branch.clone() for branch in branches]
    request = MeasureRequest(THIRDS, batches=2)
    measure_candidate(binding, problem, branches, request, branches[0].weights(), training=TRAINING, seed=5)
    for branch, copy in zip(branches, before, strict=True):
        assert torch.equal(branch.rows["float32"], copy.rows["float32"])
        assert all(torch.equal(branch.buffers[name], copy.buffers[name]) for name in copy.buffers)
