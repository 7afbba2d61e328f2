"""A figure as data, and as CSV."""

from __future__ import annotations

import base64
import csv
import io
import re

import pytest

import report_samples as samples
from forkmerge.report import Axis, Figure, Page, Panel, Section, Series, figure_csv, to_html

pytest.importorskip("plotly")


pytest.importorskip("matplotlib")


def test_every_point_of_a_figure_is_in_its_csv_with_full_precision():
    figure = samples.all_figures()[0]
    rows = list(csv.DictReader(io.StringIO(figure_csv(figure))))
    series = figure.panels[0].series[0]
    mine = [row for row in rows if row["series"] == series.name]
    assert tuple(float(row["y"]) for row in mine) == series.y
    assert tuple(float(row["low"]) for row in mine) == series.low
    page = to_html(Page("t", "run", "h", {}, (Section("s", "", (figure,)),)))
    link = re.search(r'download="gain.csv" href="data:text/csv;charset=utf-8;base64,([^"]*)"', page)
    assert link is not None
    assert base64.b64decode(link[1]).decode() == figure_csv(figure)


def test_no_name_in_a_figure_is_a_formula_in_its_csv():
    axis = Axis("task", labels=("=1+1", "@b"))
    series = Series("+c", (-1.5, 2.0), (0.0, 1.0), texts=("-d", "\t=e"))
    figure = Figure("f", "t", "", (Panel("=title", Axis("x"), axis, (series,)),))
    rows = list(csv.reader(io.StringIO(figure_csv(figure))))[1:]
    assert rows == [
        ["'=title", "'+c", "-1.5", "'=1+1", "", "", "", "'-d"],
        ["'=title", "'+c", "2.0", "'@b", "", "", "", "'\t=e"],
    ]
