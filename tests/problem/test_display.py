"""What prompts and notebooks show: short, rounded, escaped, from one description."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import forkmerge as fm
from compare_problem import recipe
from forkmerge.analysis.results import AuxiliaryFinding, Diagnosis, Gain, TransferCurve
from forkmerge.experiments.comparison import Comparison, plan_comparison
from forkmerge.problem.display import Display, Displayed
from problems import evaluation, fit, shared_problem

EVIL = "<img src=x onerror=alert(1)>"


def forked(name: str = "joint") -> fm.Fork:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 3)
    return fm.fork(model, optimizer, {"alone": {"ctr": 1.0}, name: {"ctr": 1.0, "dwell": 1 / 3}})


def merged(name: str = "joint") -> Displayed:
    branches = forked(name)
    for branch in branches:
        loss = branch.model(torch.ones(4, 2)).mean() * sum(branch.task_weights.values())
        loss.backward()
        branch.optimizer.step()
    return branches.merge(score=lambda m: -m(torch.ones(1, 2)).item() / 3)


def diagnosis(auxiliary: str = "aux") -> Diagnosis:
    points = (Gain(0.25, (1 / 30,), 1 / 30, None, None), Gain(1.0, (-0.2,), -0.2, None, None))
    curve = TransferCurve("tgt", auxiliary, "EW", (0,), "test", (0.5,), points, "weak negative", 0.95)
    finding = AuxiliaryFinding(auxiliary, curve, None, None, None, None, "down-weight", "it helps at a small weight")
    return Diagnosis("tgt", (finding,), {})


def comparison() -> Comparison:
    return plan_comparison("compare_problem:recipe", methods="ew", seeds=2)


OBJECTS = {
    "Run": lambda: fit(fm.ForkMerge("per_auxiliary", interval=4)),
    "Problem": shared_problem,
    "Fork": forked,
    "MergeOutcome": merged,
    "Diagnosis": diagnosis,
    "Comparison": comparison,
}


class Tags(HTMLParser):
    """Checks that tags are closed in order, and keeps their names and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", OBJECTS)
def test_a_prompt_shows_a_few_short_lines_with_rounded_numbers(name: str) -> None:
    shown = repr(OBJECTS[name]())
    assert 2 <= len(shown.splitlines()) <= 12
    assert max(map(len, shown.splitlines())) <= 120
    assert not re.search(r"\d\.\d{5,}", shown)
    assert "object at 0x" not in shown


@pytest.mark.parametrize("name", OBJECTS)
def test_a_notebook_shows_html_without_scripts_or_colours_of_its_own(name: str) -> None:
    thing = OBJECTS[name]()
    page = thing._repr_html_()
    tags = Tags(page)
    assert tags.seen <= {"div", "b", "table", "tr", "th", "td"}
    assert tags.attributes <= {"style"}
    assert set(re.findall(r"(?<![-\w])color:(\w+)", page)) <= {
        "inherit"
    }  # the notebook's own text colour, light or dark
    assert thing.display().title.split("'")[0] in page


@pytest.mark.parametrize("make", [forked, merged, diagnosis])
def test_names_are_text_in_html(make: Callable[[str], Displayed]) -> None:
    page = make(EVIL)._repr_html_()
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


def test_control_characters_reach_neither_a_terminal_nor_a_page() -> None:
    display = Display("a\x1b[31m", {"b\x1b": "c\u202e"}, ("d\x1b",), (("e\x1b",),), ("f\x1b",))
    assert "\x1b" not in display.text() + display.html()
    assert "\u202e" not in display.text() + display.html()


def test_a_problem_names_streams_and_what_is_held_out() -> None:
    assert repr(shared_problem()).splitlines() == [
        "Problem: target 'tgt'",
        "  auxiliaries  aux, odd",
        f"  validation   tgt: {evaluation().size} examples, minus_loss ↑",
        "  test         none",
        "  weights      multiply losses",
        "  stream  tasks          examples  batch",
        "  all     tgt, aux, odd        16      8",
    ]


def test_a_diagnosis_explains_its_symbols() -> None:
    assert repr(diagnosis()).splitlines() == [
        "Diagnosis of 'tgt'",
        "  auxiliary  largest TG  at λ  transfer       advice",
        "  aux            +0.033  0.25  weak negative  down-weight",
        "  TG: transfer gain, the score with the auxiliary minus without it; λ: the auxiliary's weight",
    ]


def test_a_merge_names_coefficients_and_scores() -> None:
    lines = repr(merged()).splitlines()
    assert lines[0].startswith("Merge of 2 branches: score ")
    assert lines[2].split() == ["branch", "coefficient", "own", "score"]
    assert lines[-1].strip().startswith("coefficient (Λ): the branch's share")


def test_a_comparison_is_shown_as_its_plan() -> None:
    lines = repr(comparison()).splitlines()
    assert lines[0] == "Comparison: 4 runs, before any tuning"
    assert recipe().problem.target in lines[2]
