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
    Series,
    figure_csv,
)
from forkmerge.report.colours import GAIN, GAIN_ON_DARK, LOSS, LOSS_ON_DARK
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


def test_only_figures_of_the_paper_have_its_colours():
    for figure in samples.all_figures():
        drawn = json.dumps(to_plotly(figure))
        assert ("$paper-scale" in drawn) == (figure.name in ("matrix", "mixture"))
        assert "$paper-scale" not in drawn or "As in the paper" in figure.caption


def test_gains_and_losses_differ_by_marker_and_by_sign_too():
    values = (0.1, -0.1, 0.0)
    dots = Series("", values, (0.0, 1.0, 2.0), kind="dots", values=values)
    (drawn,) = to_plotly(Figure("f", "", "", (Panel("", Axis(), Axis(labels=("a", "b", "c")), (dots,)),)))
    marker = drawn["data"][0]["marker"]
    assert marker["symbol"] == ["triangle-up", "triangle-down", "circle"]
    assert marker["color"] == ["$gain", "$loss", "$muted"]
    heat = Panel("", Axis(labels=("a",)), Axis(labels=("b",)), heat=Heat(((0.5,),), is_gain=True))
    assert to_plotly(Figure("f", "", "", (heat,)))[0]["data"][0]["colorbar"]["tickformat"].startswith("+")


def test_losses_are_redder_than_gains_and_both_can_be_read_on_the_page():
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for gain, loss, card in ((GAIN, LOSS, "#ffffff"), (GAIN_ON_DARK, LOSS_ON_DARK, "#1b2028")):
        assert int(loss[1:3], 16) > int(gain[1:3], 16)
        for colour in (gain, loss):
            high, low = sorted((light(colour), light(card)), reverse=True)
            assert (high + 0.05) / (low + 0.05) > 4.5, "the contrast that small text needs"


def test_a_point_without_an_interval_says_none_under_the_pointer():
    dots = Series("", (0.1, 0.2), (0.0, 1.0), low=(0.0, None), high=(0.3, None), kind="dots")
    panel = Panel("", Axis(is_percent=True), Axis(labels=("a", "b")), (dots,))
    (drawn,) = to_plotly(Figure("f", "", "", (panel,)))
    assert drawn["data"][0]["customdata"] == [" [+0.00%, +30.00%]", ""]
