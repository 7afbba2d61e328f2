"""Figures for paper."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

import report_samples as samples
from forkmerge.report.matplotlib_figure import FORMATS, draw

pytest.importorskip("plotly")


pytest.importorskip("matplotlib")


@pytest.mark.parametrize("form", FORMATS)
def test_every_figure_can_be_drawn_for_paper(tmp_path, form):
    for figure in samples.all_figures(hostile=True) if form == "svg" else samples.all_figures()[:1]:
        path = tmp_path / f"{figure.name}.{form}"
        draw(figure, path)
        assert path.stat().st_size > 1000
        if form == "svg":
            ElementTree.parse(path)
    if form == "svg":
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in (tmp_path / "coefficients.svg").read_text("utf-8")
