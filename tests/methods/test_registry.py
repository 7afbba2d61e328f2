"""Methods by name, with options, and the tables of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import forkmerge as fm
from forkmerge.methods import (
    GCS,
    IMTL_L,
    METHODS,
    MGDA,
    OL_AUX,
    AutoLambda,
    CAGrad,
    GradVac,
    Method,
    NashMTL,
    PCGrad,
    flavours_markdown,
    method_from,
    methods_markdown,
    methods_table,
)
from paths import ROOT


class TestNames:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [("PCGrad", PCGrad), ("nash-mtl", NashMTL), ("auto-λ", AutoLambda), ("ol_aux", OL_AUX), ("IMTL-L", IMTL_L)],
    )
    def test_spelling_is_forgiven(self, name: str, kind: type[Method]) -> None:
        assert method_from(name) == kind()

    def test_options_come_with_the_name_or_beside_it(self) -> None:
        assert method_from("grad-vac(beta=0.1)") == method_from({"name": "GradVac", "beta": 0.1}) == GradVac(beta=0.1)
        assert method_from("MGDA(solver='frank_wolfe', iterations=9)") == MGDA(solver="frank_wolfe", iterations=9)
        assert method_from({"name": "torchjd:STCH", "mu": 0.5}) == method_from("torchjd:STCH(mu=0.5)")
        assert fm.Joint(method={"name": "GCS", "weighted": False}).method == GCS(weighted=False)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("GradVac(gamma=1)", "unknown option of GradVac 'gamma'.*Known: beta"),
            ({"name": "GradVac", "gamma": 1}, "unknown option of GradVac 'gamma'"),
            ("GradVac(0.1)", "write options as in"),
            ("GradVac(beta=0.1", "write options as in"),
            ("GradVac(beta=open)", "write options as in"),
            ({"beta": 0.1}, "must be a method"),
        ],
    )
    def test_options_that_cannot_be_read_are_refused(self, value: Any, message: str) -> None:
        with pytest.raises(fm.ProblemError, match=message):
            method_from(value)

    def test_no_two_methods_share_a_forgiving_name(self) -> None:
        for name, kind in METHODS.items():
            assert type(method_from(name.lower())) is kind

    def test_an_unknown_name_lists_what_exists(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"Did you mean 'PCGrad'.*torchjd:"):
            method_from("PCGard")
        with pytest.raises(fm.ProblemError, match="must be a method"):
            method_from(3)

    def test_the_table_has_a_row_per_method(self) -> None:
        rows = methods_table()
        assert [row["name"] for row in rows] == list(METHODS)
        assert all(row["uses"] in ("losses", "Gramian", "gradients") for row in rows)
        assert next(row for row in rows if row["name"] == "CAGrad")["options"] == {"c": 0.4, "rescale": "none"}

    def test_the_page_shows_the_table(self) -> None:
        page = (ROOT / "docs" / "methods.md").read_text("utf-8")
        for table in methods_markdown().strip().split("\n\n"):
            assert table in page


class TestFlavours:
    """Every method as in its own paper, and as in the scripts of ForkMerge's authors."""

    def test_originals_are_the_defaults(self) -> None:
        for name, kind in METHODS.items():
            assert kind.originals() == kind() == method_from(f"originals:{name}")

    def test_what_the_authors_scripts_change(self) -> None:
        changed = [name for name, kind in METHODS.items() if kind.authors_scripts() != kind()]
        assert changed == [
            *("UW", "MGDA", "GradNorm", "GradVac", "CAGrad", "NashMTL", "GCS", "OL_AUX", "ARML", "TargetAwareGradVac"),
        ]
        for name, kind in METHODS.items():
            assert method_from(f"authors_scripts:{name}") == kind.authors_scripts()

    def test_names_and_options_are_spelled_like_the_others(self) -> None:
        assert method_from("Authors-Scripts:ol_aux(every=3)") == replace(OL_AUX.authors_scripts(), every=3)
        assert method_from({"name": "authors_scripts:CAGrad", "c": 0.2}) == CAGrad(c=0.2, rescale="square")

    def test_an_option_of_the_other_flavour_is_refused_by_name(self) -> None:
        with pytest.raises(fm.ProblemError, match="unknown option of FreeARML 'every'"):
            method_from("authors_scripts:ARML(every=3)")
        with pytest.raises(fm.ProblemError, match="Did you mean 'GCS'"):
            method_from("authors_scripts:GSC")

    def test_the_page_shows_the_table(self) -> None:
        assert flavours_markdown().strip() in (ROOT / "docs" / "methods.md").read_text("utf-8")
