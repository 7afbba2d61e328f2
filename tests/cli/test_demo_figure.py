"""The demo's one figure."""

from __future__ import annotations

from forkmerge.cli.demo_figure import _spread, coefficients_figure

ONE = {"mean_coefficients": [{"a": 0.25, "b": 0.75}], "coefficients": [[{"a": 0.25, "b": 0.75}]]}
TWO = {"mean_coefficients": [{"a": 0.5, "b": 0.5}], "coefficients": [[{"a": 0.0, "b": 1.0}], [{"a": 1.0}]]}


def test_every_seed_is_a_dot_beside_the_line_of_the_means():
    (panel,) = coefficients_figure({"two": TWO}).panels
    lines = {series.name: series.y for series in panel.series if series.kind == "line"}
    dots = {series.name: series.y for series in panel.series if series.kind == "dots"}
    assert lines == {"a": (0.5,), "b": (0.5,)}
    assert dots == {"a": (0.0, 1.0), "b": (1.0, 0.0)}
    assert all(panel.is_crowded(series) == (series.kind == "dots") for series in panel.series)


def test_one_seed_is_the_line_itself():
    figure = coefficients_figure({"one": ONE})
    assert [series.kind for series in figure.panels[0].series] == ["line", "line"]
    assert "seeds" not in figure.title


def test_equal_coefficients_are_drawn_side_by_side():
    shifts = _spread([0.0, 1.0, 0.0, 0.0], width=0.2)
    assert shifts[1] == 0
    assert len({shifts[0], shifts[2], shifts[3]}) == 3
    assert max(map(abs, shifts)) <= 0.1
