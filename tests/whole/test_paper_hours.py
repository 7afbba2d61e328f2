"""The hours on the page of the paper are those that its steps and the counted FLOPs of a step give."""

from __future__ import annotations

import re

import pytest

import paper_hours
from forkmerge.analysis.advice import ProbeSettings
from forkmerge.analysis.diagnosis.budget import PieceTimes, plan_budget
from forkmerge.analysis.transfer import WEIGHTS
from forkmerge.datasets.domainnet import BATCH, COUNTS


def test_the_page_has_the_hours_that_are_computed() -> None:
    page = paper_hours.PAGE.read_text("utf-8")
    assert paper_hours.written(page) == page, "type python tests/paper_hours.py"


def test_every_recipe_with_steps_has_hours() -> None:
    named = re.findall(r"recipes/paper/(\w+)\.toml`.*\| [\d.]+ M \|", paper_hours.PAGE.read_text("utf-8"))
    assert sorted(named) == sorted(paper_hours.STEPS)


@pytest.mark.parametrize(("hours", "has_all"), [(20, False), (27, True), (None, True)])
def test_the_budget_of_figures_2_and_3_buys_all_weights_of_the_paper(hours: int | None, has_all: bool) -> None:
    """Of both targets, with what validation takes; hours that are None are those of the page's command."""
    page = paper_hours.PAGE.read_text("utf-8")
    (typed,) = re.findall(r"domainnet_analysis\.toml --target painting --budget (\d+)h`", page)
    step = paper_hours.domains("resnet-18") / paper_hours.RATE
    for target in ("painting", "quickdraw"):
        validation = 1000 * COUNTS[target][1] / BATCH * step / 3
        costs = PieceTimes(step, {"others": step}, fixed=4 * validation, loading=0.0)
        budget = 3600 * (int(typed) if hours is None else hours)
        plan = plan_budget(costs, ProbeSettings(1250, 1250), full_steps=25_000, budget=budget, workers=1)
        assert (plan.weights == WEIGHTS) == has_all


@pytest.mark.parametrize(("network", "forward"), [("resnet-18", 1.82e9), ("resnet-101", 7.8e9), ("vit-base", 17.5e9)])
def test_a_step_counts_what_is_published_of_a_network(network: str, forward: float) -> None:
    """Multiplications with an addition of one image of 224 × 224, forwards; backwards there are twice as many."""
    assert paper_hours.domains(network) == pytest.approx(48 * 3 * 2 * forward, rel=0.03)
