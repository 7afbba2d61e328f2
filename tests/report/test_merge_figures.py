"""Figures of merges, as data."""

from __future__ import annotations

import pytest

import report_samples as samples
from forkmerge.report import (
    merge_figures,
)

pytest.importorskip("plotly")


pytest.importorskip("matplotlib")


def test_names_of_mixed_models_stand_outside_the_triangle():
    panel = merge_figures.combination_gains([samples.models(samples.names(3))[0]]).panels[0]
    dots, *names = panel.series
    assert all(len(series.x) == 1 for series in names)  # nothing shows through between the cells
    assert [series.labels for series in names] == [(name,) for name in samples.names(3)]
    assert all(not min(dots.y) <= series.y[0] <= max(dots.y) for series in names)
