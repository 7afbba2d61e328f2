"""Figures of transfer gain, gradients and shift, as data."""

from __future__ import annotations

from dataclasses import replace

import pytest

import report_samples as samples
from forkmerge.report import (
    Axis,
    Panel,
    Series,
    transfer_figures,
)
from forkmerge.report.plotly_figure import to_plotly

pytest.importorskip("plotly")


pytest.importorskip("matplotlib")


def test_forty_auxiliaries_are_rows_of_heat_maps():
    tasks = samples.names(40)
    made = [
        transfer_figures.gain_curve([samples.curve(task, 0.01 * i - 0.2) for i, task in enumerate(tasks)]),
        transfer_figures.shift_curve([samples.shift(task, 0.01 * i) for i, task in enumerate(tasks)]),
        transfer_figures.cosine_distribution([samples.similarity(task, 0.0) for task in tasks]),
    ]
    for figure in made:
        for panel in figure.panels:
            assert panel.y.labels == tuple(tasks)
            assert not panel.series
            assert panel.heat is not None
            assert len(panel.heat.values) == 40
        assert len(figure.caption) < 500
        assert "ands:" not in figure.caption
        to_plotly(figure)
    gains, (csd, beside), cosines = made[0].panels[0], made[1].panels, made[2].panels[0]
    assert gains.x.labels == csd.x.labels == beside.x.labels == ("0", "1/16", "1/4", "1")
    assert gains.heat.is_gain
    assert gains.heat.values[3][1:] == tuple(point.mean for point in samples.curve("", -0.17).points)
    assert beside.heat.is_gain
    assert not csd.heat.is_gain
    assert all(sum(row) == pytest.approx(1) for row in cosines.heat.values)
    one = samples.similarity(tasks[7], 0.0).cosines
    middles = [
        x for x, share in zip(cosines.heat.x, cosines.heat.values[7], strict=True) for _ in range(round(80 * share))
    ]
    assert max(abs(a - b) for a, b in zip(sorted(one), middles, strict=True)) <= (middles[-1] - middles[0]) / 20


def test_panels_of_a_feature_map_have_one_scale_and_dots_of_one_size():
    made = samples.features(samples.names(2))
    few = tuple(replace(panel, positions=panel.positions[:3], origins=panel.origins[:3]) for panel in made.panels[:1])
    figure = transfer_figures.feature_map([replace(made, panels=(*few, *made.panels[1:]))])
    assert figure.across == len(made.panels) == 4
    x = [place[0] for place in made.panels[1].positions]
    for panel in figure.panels:
        assert panel.x == figure.panels[0].x
        assert panel.x.low < min(x) < max(x) < panel.x.high
    crowd, single = (Series("", (0.0,) * count, (0.0,) * count, kind="dots") for count in (31, 1))
    panel = Panel("", Axis(), Axis(), (crowd, single, replace(crowd, x=(), y=())))
    assert [panel.is_crowded(series) for series in panel.series] == [True, False, True]
    assert not replace(panel, series=(single,)).is_crowded(single)


def test_a_band_is_mean_and_deviation_and_none_where_one_is_missing():
    assert transfer_figures.band((1.0, 0.25), (0.5, 0.5)) == ((0.5, -0.25), (1.5, 0.75))
    assert transfer_figures.band((1.0, 0.25), (0.5, 0.5), least=0.0)[0] == (0.5, 0.0)
    assert transfer_figures.band((1.0, 0.25), (0.5, None)) == transfer_figures.band((1.0,), ()) == ((), ())
    assert transfer_figures.band((1.0,), (float("nan"),)) == ((None,), (None,))
