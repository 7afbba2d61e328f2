"""A page as HTML: names stay names, whatever they contain."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

import report_samples as samples
from forkmerge.report import (
    Page,
    Section,
    to_html,
)
from forkmerge.report.run_page import run_page

pytest.importorskip("plotly")


pytest.importorskip("matplotlib")


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


def test_names_stay_text_everywhere_in_the_page():
    figures = samples.all_figures(hostile=True)
    page = run_page(samples.saved_run(6, 3, hostile=True))
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
