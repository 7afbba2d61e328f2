"""Results survive a round trip through JSON."""

from __future__ import annotations

import json
import math

import pytest

from forkmerge.analysis.merge_results import LossPlane
from forkmerge.analysis.results import Diagnosis, Gain, GradientSimilarity, TransferCurve, TransferMatrix
from forkmerge.errors import ProblemError, StoreError
from report_samples import diagnosis

POINTS = (Gain(0.25, (0.1, 0.3), 0.2, -0.1, 0.5), Gain(1.0, (-0.1, -0.2), -0.15, None, None))
CURVE = TransferCurve("a", "b", "Joint", (0, 1), "validation", (0.5, 0.6), POINTS, "not enough evidence", 0.95)


def test_a_result_read_back_from_json_is_the_result_that_was_written():
    matrix = TransferMatrix("equal weights", ("a", "b"), ("a", "b"), ((None, POINTS[0]), (POINTS[1], None)), "test")
    plane = LossPlane(
        ("p", "q", "r"), ((0.0, 0.0), (1.0, 0.0), (0.5, 2.0)), {"m": (0.5, 0.5)}, (0.0,), (0.0,), ((3.0,),)
    )
    for result in (CURVE, matrix, plane, Diagnosis("a", (), {"seeds": 3.0, "steps": "all"})):
        again = type(result).from_json(json.loads(json.dumps(result.to_json(), allow_nan=False)))
        assert again == result
    assert matrix.negatives == 1
    assert matrix.pairs == 2


def test_a_number_that_is_not_finite_comes_back_as_nan():
    again = GradientSimilarity.from_json(GradientSimilarity("a", "b", 0, (), 3, math.nan, None).to_json())
    assert math.isnan(again.mean)
    assert again.std is None
    assert again.conflicts == 0


def test_a_curve_knows_its_best_point_and_says_which_exist():
    assert CURVE.best.weight == 0.25
    assert CURVE.at(1.0).mean == -0.15
    with pytest.raises(ProblemError, match=r"Measured: 0\.25, 1"):
        CURVE.at(0.5)


def test_a_file_of_something_else_is_refused_in_words():
    with pytest.raises(StoreError, match="not a TransferCurve"):
        TransferCurve.from_json({"target": "a"})


def test_the_word_of_earlier_versions_is_read_as_what_it_means_now():
    finding = diagnosis().findings[0]
    assert type(finding).from_json({**finding.to_json(), "advice": "undecided"}).advice == "no difference shown"
