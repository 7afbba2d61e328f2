"""The list of methods."""

from __future__ import annotations

import json

from command_line import invoke
from forkmerge.experiments.compared.method_words import ABOUT
from forkmerge.methods import METHODS


def test_methods_lists_every_word_and_method():
    shown, data = invoke("methods").stdout, json.loads(invoke("methods", "--json").stdout)
    assert data["words"] == ABOUT
    assert [row["name"] for row in data["methods"]] == list(METHODS)
    for name in (*ABOUT, *METHODS):
        assert name in shown
    assert (
        "| method | uses | state | passes | memory | target | heads | paper |" in invoke("methods", "--markdown").stdout
    )


def test_a_method_is_shown_in_either_flavour():
    assert invoke("methods", "GCS").stdout.startswith("GCS\n")
    shown = invoke("methods", "authors_scripts:gcs").stdout
    assert shown.startswith("GCS(weighted=False)\n")
    assert "Du et al." in shown
