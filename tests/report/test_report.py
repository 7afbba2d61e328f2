"""Pages and figures of any folder: what is refused, and what must be installed."""

from __future__ import annotations

import builtins

import pytest

import report_samples as samples
from command_line import invoke
from forkmerge.errors import ConfigError, StoreError
from forkmerge.report import (
    page_from,
    write_figure,
    write_report,
)
from forkmerge.report.run_page import run_page

pytest.importorskip("plotly")


pytest.importorskip("matplotlib")


def test_other_folders_are_refused_by_name(tmp_path):
    with pytest.raises(StoreError, match="holds no run, comparison or diagnosis"):
        page_from(tmp_path)
    (tmp_path / "diagnosis_plan.json").write_text("{}")
    with pytest.raises(StoreError, match="has not ended"):
        page_from(tmp_path)
    (tmp_path / "diagnosis.json").write_text("{")
    with pytest.raises(StoreError, match="is not a diagnosis"):
        page_from(tmp_path)


def test_unknown_figures_and_forms_say_what_there_is(tmp_path):
    samples.write_diagnosis(tmp_path)
    with pytest.raises(ConfigError, match=r"Did you mean 'gain'\? Known: gain, cosines, conflict, shift"):
        write_figure(tmp_path, "gains", tmp_path / "a.pdf")
    with pytest.raises(ConfigError, match=r"fig\.pdf, fig\.svg, fig\.png"):
        write_figure(tmp_path, "gain", tmp_path / "a.jpg")
    with pytest.raises(ConfigError, match="a page is an HTML file"):
        write_report(tmp_path, tmp_path / "a.pdf")
    assert "error: --figure" in invoke("report", tmp_path, "--figure", "nothing", code=2).output


@pytest.mark.parametrize("name", ["plotly", "matplotlib"])
def test_a_missing_library_is_named_with_what_to_install(tmp_path, monkeypatch, name):
    for module in ("page", "matplotlib_figure"):
        monkeypatch.setattr(f"forkmerge.report.{module}.find_spec", lambda word: None if word == name else word)
    samples.write_diagnosis(tmp_path)
    monkeypatch.chdir(tmp_path)  # where --out is not given, a figure goes to the folder one is in
    words = ["--figure", "gain"] if name == "matplotlib" else []
    assert "pip install 'forkmerge[report]'" in invoke("report", tmp_path, *words, code=2).output


def test_a_figure_of_a_folder_is_written_by_the_command(tmp_path, comparison):
    out = tmp_path / "figures" / "change.svg"
    assert invoke("report", comparison, "--figure", "change", "--out", out).output.strip() == str(out)
    assert "Δ_m of every method" in out.read_text("utf-8")


def test_reports_import_no_drawing_library_before_they_draw(monkeypatch):
    known = builtins.__import__

    def watched(name, *rest, **more):
        assert name.partition(".")[0] not in ("matplotlib", "plotly")
        return known(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", watched)
    assert run_page(samples.saved_run(3, 3)).figures
