"""GCS: auxiliary gradients enter as far as they agree with the target's."""

from __future__ import annotations

from forkmerge.methods import GCS
from forkmerge.testing import MethodConformance
from method_steps import assert_first_direction


class TestGCS(MethodConformance):
    method = GCS


def test_the_direction_of_the_first_step() -> None:
    assert_first_direction(GCS(weighted=False), (-2.0, -1.0))  # g_b points away from g_m
    assert_first_direction(GCS(), (-1.7071067811865475, -0.7071067811865475))


def test_the_authors_scripts_take_the_unweighted_version() -> None:
    assert GCS.authors_scripts() == GCS(weighted=False)
