"""Pages and figures from what is on disk: what they say, and that names stay names."""

from __future__ import annotations

import base64
import builtins
import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import compare_problem
import report_samples as samples
from forkmerge.algorithms.table_data import Table
from forkmerge.analysis.diagnosis.pieces import FORMAT
from forkmerge.analysis.merge_results import Survival
from forkmerge.analysis.results import AuxiliaryFinding, Pictures
from forkmerge.cli.commands import app
from forkmerge.errors import ConfigError, StoreError
from forkmerge.experiments.comparison import plan_comparison, run_comparison
from forkmerge.experiments.paired_statistics import Paired
from forkmerge.experiments.results_file import read_comparison, to_text, write_records
from forkmerge.experiments.summary import Standing
from forkmerge.report import (
    Axis,
    Figure,
    Heat,
    Page,
    Panel,
    Section,
    Series,
    figure_csv,
    merge_figures,
    page_from,
    save_result,
    to_html,
    transfer_figures,
    write_figure,
    write_report,
)
from forkmerge.report.comparison_page import judge
from forkmerge.report.diagnosis_page import diagnosis_page
from forkmerge.report.matplotlib_figure import FORMATS, draw
from forkmerge.report.plotly_figure import to_plotly
from forkmerge.report.run_page import run_page, use_of
from problems import Stopped

pytest.importorskip("plotly")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "comparison"
    planned = plan_comparison(
        "compare_problem:recipe", methods="ew,forkmerge", targets="all", seeds=2, tune={"interval": [2, 3]}
    )
    run_comparison(planned, folder)
    return folder


def run(*words: object, code: int = 0) -> str:
    found = CliRunner().invoke(app, [str(word) for word in words])
    assert found.exit_code == code, found.output
    return found.output


def write_diagnosis(folder: Path) -> None:
    (folder / "diagnosis_plan.json").write_text("{}")
    content = {"format": FORMAT, "diagnosis": samples.diagnosis().to_json()}
    (folder / "diagnosis.json").write_text(json.dumps(content))


class Reader(HTMLParser):
    """Collects tags, the text outside scripts, and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.texts, self.links, self.quiet = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.quiet = tag in ("script", "style")
        found = dict(attributes)
        self.links += [found[key] for key in ("href", "src") if key in found]
        assert not [key for key in found if key.startswith("on")]

    def handle_endtag(self, tag):
        self.quiet = False

    def handle_data(self, data):
        if not self.quiet:
            self.texts.append(data)


def test_a_run_folder_becomes_a_page_with_the_command_that_made_it(tmp_path):
    folder = tmp_path / "a run"
    said = run("run", "compare_problem:recipe", "--out", folder)
    assert f"report '{folder}'" in said
    assert run("report", folder).strip() == str(folder / "report.html")
    page = page_from(folder)
    assert set(page.figures) == {"coefficients", "relevance", "scores", "losses"}
    assert page.headline.startswith("ForkMerge on tgt reached accuracy")
    assert page.commands is not None
    assert page.commands["this page"] == f"forkmerge report '{folder}'"
    assert page.commands["this run"]
    assert page.environment is not None
    assert page.environment["torch"]
    text = (folder / "report.html").read_text("utf-8")
    assert text.count("<html") == 1
    assert json.loads(run("report", folder, "--out", tmp_path / "new" / "b.html", "--json"))["file"].endswith("b.html")


def test_a_comparison_folder_becomes_a_page_with_verdicts_curves_and_costs(comparison):
    page = page_from(comparison)
    assert set(page.figures) == {
        "change", "targets", "cost", "pareto", "learning", "coefficients", "relevance", "interval"
    }  # fmt: skip
    methods = page.figures["change"].panels[0].y.labels
    assert set(methods) == {"EW", "ForkMerge"}
    learning = page.figures["learning"].panels
    assert [panel.title for panel in learning] == ["tgt", "aux"]
    assert {series.name for series in learning[0].series} == {"STL", "EW", "ForkMerge"}
    # Two metrics: all curves are changes against STL's mean, so STL itself ends at 0 and the others do not start there.
    lines = {series.name: series.y for series in learning[0].series}
    assert lines["STL"][-1] == pytest.approx(0, abs=1e-9)
    assert lines["EW"][0] != 0
    assert page.facts["runs"] == "12 of 12"
    assert "STL" in page.headline
    assert write_report(comparison).stat().st_size < 10e6


def test_a_file_of_records_has_the_page_of_its_comparison(comparison, tmp_path):
    write_records(comparison, tmp_path / "small.json")
    page, whole = page_from(tmp_path / "small.json"), page_from(comparison)
    assert set(page.figures) == set(whole.figures) - {"relevance"}
    mine, theirs = (found.figures["coefficients"].panels[0].series for found in (page, whole))
    assert [series.name for series in mine] == [series.name for series in theirs]
    assert mine[0].y == pytest.approx(theirs[0].y, rel=1e-4)
    for one, other in zip(*(found.figures["learning"].panels for found in (page, whole)), strict=True):
        assert [s.name for s in one.series] == [s.name for s in other.series]
        assert one.series[1].y == pytest.approx(other.series[1].y, rel=1e-3, abs=1e-4)
    assert page.headline == whole.headline
    assert run("report", tmp_path / "small.json").strip() == str(tmp_path / "small.html")


def test_methods_that_differ_in_their_interval_show_its_effect(comparison, tmp_path):
    write_records(comparison, tmp_path / "a.json")
    plan, outcomes = read_comparison(tmp_path / "a.json")
    merged = [o for o in outcomes if o.method == "forkmerge" and o.kind == "final" and o.target == "tgt"]
    swept = [replace(o, method=f"fm[{i}]", label=f"ForkMerge[interval={i}]") for i in (2, 30) for o in merged]
    plan["methods"] += [{"word": f"fm[{i}]", "label": f"ForkMerge[interval={i}]"} for i in (2, 30)]
    kept = [o for o in outcomes if o.kind == "final"]
    (tmp_path / "b.json").write_text(to_text(plan, [*kept, *swept]))
    (panel,) = page_from(tmp_path / "b.json").figures["interval"].panels
    assert panel.title == "ForkMerge on tgt"
    assert panel.series[0].x == (2, 30)
    assert panel.series[0].y[0] == pytest.approx(sum(o.metrics["accuracy"] or 0.0 for o in merged) / 2)


def test_a_comparison_that_has_just_begun_has_a_page(tmp_path):
    planned = plan_comparison("compare_problem:recipe", methods="ew", seeds=1)
    compare_problem.stop_at.append((0, 2))
    with pytest.raises(Stopped):
        run_comparison(planned, tmp_path / "c")
    page = page_from(tmp_path / "c")
    assert page.facts["runs"].endswith("of 2")
    to_html(page)


def test_a_diagnosis_folder_becomes_a_page_of_verdicts(tmp_path):
    write_diagnosis(tmp_path)
    page = page_from(tmp_path)
    assert page.headline == "For digits: use mnist; down-weight photos; drop clash."
    assert {section.title: [item.name for item in section.items[-2:]] for section in page.sections[1:]} == {
        "Gradient conflict": ["cosines", "conflict"],
        "Distribution shift": ["shift", "features"],
        "Between the models": ["mixture", "line"],
    }
    made = samples.diagnosis()
    assert page.figures["features"].panels[1].title == f"{made.pictures.features[0].auxiliary}, λ = 1/16"
    assert page.figures["mixture"].panels[0].series[0].values == made.pictures.mixtures[0].gains
    assert page.figures["line"].panels[0].series[0].x == made.pictures.lines[0].positions
    text = to_html(page)
    for verdict in ("▲ use", "▽ down-weight", "▼ drop", "▼ strong negative"):
        assert verdict in text
    assert diagnosis_page(made, tmp_path) == page
    bare = diagnosis_page(replace(made, pictures=Pictures()), tmp_path)
    assert set(bare.figures) == {"gain", "cosines", "conflict", "shift"}


def test_a_diagnosis_says_what_was_run_and_where(tmp_path):
    made = replace(samples.diagnosis(), settings={"recipe": "digits"}, environment={"python": "3.11"})
    page = diagnosis_page(made, tmp_path)
    assert page.configuration == {"settings": made.settings, "plan": made.plan}
    assert page.environment == made.environment


def test_a_diagnosis_of_many_auxiliaries_has_few_panels_and_notes(tmp_path):
    made, findings = samples.diagnosis(), []
    for i in range(40):
        name, slope = f"task{i:02d}", 0.001 * i
        parts = samples.curve(name, slope, "positive"), samples.similarity(name, slope), samples.shift(name, slope)
        findings.append(AuxiliaryFinding(name, *parts, 0.4, None, "use", "of reasons"))
    steps = tuple(samples.one_step(finding.auxiliary) for finding in findings)
    page = diagnosis_page(replace(made, findings=tuple(findings), one_step=(*steps, made.one_step[1])), tmp_path)
    assert page.sections[1].text.startswith("Of 40 auxiliaries the 8 with the largest")
    titles = [panel.title for panel in page.figures["conflict"].panels]
    assert len(titles) == 9
    assert "task39" in titles
    assert "task05" not in titles
    assert len(page.sections[0].items[0].notes) < 12
    to_html(page)


def test_saved_results_join_the_page_of_their_folder(tmp_path):
    write_diagnosis(tmp_path)
    for result in samples.saved_results():
        save_result(tmp_path, type(result).__name__, result)
    page = page_from(tmp_path)
    assert page.sections[-1].title == "Analysis"
    assert {"matrix", "saved-features", "saved-mixture", "saved-line", "plane", "saved-gain"} <= set(page.figures)
    tables = [item for item in page.sections[-1].items if isinstance(item, Table)]
    assert [table.rows[0][0].text for table in tables] == ["3", "3", "3"]
    to_html(page)
    assert write_figure(tmp_path, "saved-mixture", tmp_path / "a.svg").stat().st_size > 1000
    (tmp_path / "analysis" / "other.json").write_text("[]")
    with pytest.raises(StoreError, match="is not a result of an analysis"):
        page_from(tmp_path)


def test_saved_histories_of_one_target_each_have_a_panel(tmp_path):
    write_diagnosis(tmp_path)
    tasks = samples.names(3)
    for name in ("before", "after"):
        save_result(tmp_path, name, samples.history(tasks, 4))
    save_result(tmp_path, "other", samples.history(tasks[1:], 4))
    titles = [panel.title for panel in page_from(tmp_path).figures["coefficients"].panels]
    assert titles == ["task 00, after", "task 00, before", "task 01"]


def test_survival_says_how_often_the_data_was_halved(tmp_path):
    write_diagnosis(tmp_path)
    save_result(tmp_path, "a", Survival(1, (0.1,) * 40, (0.1,) * 40, 0.1, 0.1, 1.0, "alone"))
    (table,) = page_from(tmp_path).sections[-1].items
    assert table.notes == ("Validation data halved 20 times; gains are over the branch alone.",)


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


def test_names_of_a_heat_map_may_be_numbers():
    labels = ("0", "1/16", "1/4", "1")
    panel = Panel("", Axis(labels=labels), Axis(labels=("a", "<b>")), heat=Heat(((0.0, 1.0, 2.0, 3.0),) * 2))
    (drawn,) = to_plotly(Figure("f", "", "", (panel,)))
    for way, names in (("x", list(labels)), ("y", ["a", "&lt;b&gt;"])):
        assert drawn["layout"][f"{way}axis"]["tickvals"] == drawn["data"][0][way] == names


def test_only_verdicts_look_like_verdicts(tmp_path):
    made = samples.diagnosis(("positive", "drop", "use"))
    text = to_html(diagnosis_page(made, tmp_path))
    assert text.count('class="pill') == 6  # advice and verdict of each
    for name in ("positive", "drop", "use"):
        assert f'<td class="">{name}</td>' in text


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
    write_diagnosis(tmp_path)
    with pytest.raises(ConfigError, match=r"Did you mean 'gain'\? Known: gain, cosines, conflict, shift"):
        write_figure(tmp_path, "gains", tmp_path / "a.pdf")
    with pytest.raises(ConfigError, match=r"fig\.pdf, fig\.svg, fig\.png"):
        write_figure(tmp_path, "gain", tmp_path / "a.jpg")
    with pytest.raises(ConfigError, match="a page is an HTML file"):
        write_report(tmp_path, tmp_path / "a.pdf")
    assert "error: --figure" in run("report", tmp_path, "--figure", "nothing", code=2)


@pytest.mark.parametrize("name", ["plotly", "matplotlib"])
def test_a_missing_library_is_named_with_what_to_install(tmp_path, monkeypatch, name):
    for module in ("page", "matplotlib_figure"):
        monkeypatch.setattr(f"forkmerge.report.{module}.find_spec", lambda word: None if word == name else word)
    write_diagnosis(tmp_path)
    monkeypatch.chdir(tmp_path)  # where --out is not given, a figure goes to the folder one is in
    words = ["--figure", "gain"] if name == "matplotlib" else []
    assert "pip install 'forkmerge[report]'" in run("report", tmp_path, *words, code=2)


def test_names_stay_text_everywhere_in_the_page():
    figures = samples.all_figures(hostile=True)
    page = run_page(samples.story(6, 3, hostile=True))
    page = Page(page.title, page.kind, page.headline, page.facts, (*page.sections, Section("all", "", tuple(figures))))
    text = to_html(page)
    read = Reader(text)
    assert read.tags.count("script") == 3
    assert not {"img", "svg", "b"} & set(read.tags)
    shown = "".join(read.texts)
    for name in samples.HOSTILE:
        assert name in shown
    assert all(link.startswith(("data:", "#")) for link in read.links)
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert embedded is not None
    assert "<" not in embedded[1]
    assert set(json.loads(embedded[1])["figures"]) == set(page.figures)


def test_plotly_gets_escaped_names_but_the_csv_the_names_themselves():
    for figure in samples.all_figures(hostile=True):
        drawn = json.dumps(to_plotly(figure))
        texts = re.sub(r'"meta": "(\\.|[^"\\])*"', "", drawn)  # what a click on a name looks for; never drawn
        assert "<script" not in texts
        assert "<b>$ink" not in texts
        rows = list(csv.DictReader(io.StringIO(figure_csv(figure))))
        assert len(rows) > 2
        assert not [row for row in rows if "&lt;" in str(row)]


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


def test_names_of_mixed_models_stand_outside_the_triangle():
    panel = merge_figures.combination_gains([samples.models(samples.names(3))[0]]).panels[0]
    dots, *names = panel.series
    assert all(len(series.x) == 1 for series in names)  # nothing shows through between the cells
    assert [series.labels for series in names] == [(name,) for name in samples.names(3)]
    assert all(not min(dots.y) <= series.y[0] <= max(dots.y) for series in names)


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


def test_a_figure_of_a_folder_is_written_by_the_command(tmp_path, comparison):
    out = tmp_path / "figures" / "change.svg"
    assert run("report", comparison, "--figure", "change", "--out", out).strip() == str(out)
    assert "Δ_m of every method" in out.read_text("utf-8")


def test_tasks_are_called_used_or_refused_against_equal_coefficients():
    many = samples.story(40, 30).run
    assert many is not None
    words = use_of(many)
    assert words["task 01"] == "used"
    assert len(words) == 39


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.1, 0.2, "better"), (-0.2, -0.1, "worse"), (-0.1, 0.1, "no evidence"), (None, None, "no evidence")],
)
def test_a_method_is_better_only_where_the_interval_excludes_zero(low, high, word):
    standing = Standing("ew", "EW", {}, None, Paired(0.1, low, high, 1, 0, 0), None, None)
    assert judge(standing) == word


def test_a_page_of_forty_tasks_and_five_hundred_rounds_is_small():
    assert len(to_html(run_page(samples.story(40, 500))).encode()) < 10e6


def test_reports_import_no_drawing_library_before_they_draw(monkeypatch):
    known = builtins.__import__

    def watched(name, *rest, **more):
        assert name.partition(".")[0] not in ("matplotlib", "plotly")
        return known(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", watched)
    assert run_page(samples.story(3, 3)).figures
