"""The command `forkmerge report`, around pages that are not written here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import invoke


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("page", Path("r"), None)),
        (("--out", "p.html"), ("page", Path("r"), Path("p.html"))),
        (("--figure", "scores"), ("figure", Path("r"), "scores", Path("scores.pdf"))),
        (("--figure", "scores", "--out", "s.svg"), ("figure", Path("r"), "scores", Path("s.svg"))),
    ],
)
def test_a_page_is_written_or_one_figure(words, expected, monkeypatch):
    calls = []

    def page(*arguments):
        calls.append(("page", *arguments))
        return Path("written.html")

    def figure(*arguments):
        calls.append(("figure", *arguments))
        return Path("written.html")

    monkeypatch.setattr("forkmerge.cli.report.write_report", page)
    monkeypatch.setattr("forkmerge.cli.report.write_figure", figure)
    assert invoke("report", "r", *words).stdout == "written.html\n"
    assert json.loads(invoke("report", "r", *words, "--json").stdout) == {"file": "written.html"}
    assert calls == [expected, expected]
