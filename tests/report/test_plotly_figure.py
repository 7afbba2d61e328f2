"""What plotly gets to draw."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

import report_samples as samples
from forkmerge.report import (
    Axis,
    Figure,
    Heat,
    Panel,
    figure_csv,
)
from forkmerge.report.plotly_figure import to_plotly

pytest.importorskip("plotly")


pytest.importorskip("matplotlib")


def test_names_of_a_heat_map_may_be_numbers():
    labels = ("0", "1/16", "1/4", "1")
    panel = Panel("", Axis(labels=labels), Axis(labels=("a", "<b>")), heat=Heat(((0.0, 1.0, 2.0, 3.0),) * 2))
    (drawn,) = to_plotly(Figure("f", "", "", (panel,)))
    for way, names in (("x", list(labels)), ("y", ["a", "&lt;b&gt;"])):
        assert drawn["layout"][f"{way}axis"]["tickvals"] == drawn["data"][0][way] == names


def test_plotly_gets_escaped_names_but_the_csv_the_names_themselves():
    for figure in samples.all_figures(hostile=True):
        drawn = json.dumps(to_plotly(figure))
        texts = re.sub(r'"meta": "(\\.|[^"\\])*"', "", drawn)  # what a click on a name looks for; never drawn
        assert "<script" not in texts
        assert "<b>$ink" not in texts
        rows = list(csv.DictReader(io.StringIO(figure_csv(figure))))
        assert len(rows) > 2
        assert not [row for row in rows if "&lt;" in str(row)]
