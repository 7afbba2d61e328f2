"""The page of a diagnosis."""

from __future__ import annotations

from dataclasses import replace

import pytest

import report_samples as samples
from forkmerge.analysis.results import AuxiliaryFinding, Pictures
from forkmerge.report import (
    page_from,
    to_html,
)
from forkmerge.report.diagnosis_page import diagnosis_page

pytest.importorskip("plotly")


pytest.importorskip("matplotlib")


def test_a_diagnosis_folder_becomes_a_page_of_verdicts(tmp_path):
    samples.write_diagnosis(tmp_path)
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


def test_only_verdicts_look_like_verdicts(tmp_path):
    made = samples.diagnosis(("positive", "drop", "use"))
    text = to_html(diagnosis_page(made, tmp_path))
    assert text.count('class="pill') == 6  # advice and verdict of each
    for name in ("positive", "drop", "use"):
        assert f'<td class="">{name}</td>' in text
