"""The hours on the page of the paper are those that its steps and the counted FLOPs of a step give."""

from __future__ import annotations

import re

import pytest

import paper_hours


def test_the_page_has_the_hours_that_are_computed() -> None:
    page = paper_hours.PAGE.read_text("utf-8")
    assert paper_hours.written(page) == page, "type python tests/paper_hours.py"


def test_every_recipe_with_steps_has_hours() -> None:
    named = re.findall(r"recipes/paper/(\w+)\.toml`.*\| [\d.]+ M \|", paper_hours.PAGE.read_text("utf-8"))
    assert sorted(named) == sorted(paper_hours.STEPS)


@pytest.mark.parametrize(("network", "forward"), [("resnet-18", 1.82e9), ("resnet-101", 7.8e9), ("vit-base", 17.5e9)])
def test_a_step_counts_what_is_published_of_a_network(network: str, forward: float) -> None:
    """Multiplications with an addition of one image of 224 × 224, forwards; backwards there are twice as many."""
    assert paper_hours.domains(network) == pytest.approx(48 * 3 * 2 * forward, rel=0.03)
