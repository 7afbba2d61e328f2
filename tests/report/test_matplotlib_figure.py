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


def test_all_of_a_name_is_drawn(tmp_path):
    for figure in samples.all_figures(hostile=True):
        path = tmp_path / f"{figure.name}.svg"
        draw(figure, path)
        root = ElementTree.parse(path).getroot()
        texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
        drawn = "".join("".join(texts).split())
        assert "…" not in drawn
        labels = {label for panel in figure.panels for axis in (panel.x, panel.y) for label in axis.labels}
        lines = {s.name for panel in figure.panels for s in panel.series if s.is_shown and not s.is_reference}
        for name in (*labels, *(lines if len(lines) > 1 else ())):
            assert "".join(name.split()) in drawn, figure.name
