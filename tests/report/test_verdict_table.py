"""The verdict table of a diagnosis."""

from __future__ import annotations

from forkmerge.analysis.results import AuxiliaryFinding, Diagnosis
from forkmerge.analysis.transfer import transfer_curve
from forkmerge.report.verdict_table import verdict_table

GOOD, BAD = (0.09, 0.1, 0.11), (-0.09, -0.1, -0.11)


def curve(*gains, weight=1.0):
    seeds = range(len(gains))
    return transfer_curve(
        {weight: dict(zip(seeds, gains, strict=True))}, dict.fromkeys(seeds, 0.0), target="t", auxiliary="a"
    )


def test_only_gains_have_a_colour():
    findings = [AuxiliaryFinding("a", curve(*GOOD), None, None, None, 0.2, "use", "why", "score")]
    table = verdict_table(Diagnosis("t", tuple(findings), {}))
    assert [c.name for c in table.columns if c.signed and not c.is_neutral] == ["TG at the best λ", "TG at λ = 1"]
    notes = "\n".join(table.notes)
    assert "relative rise of its validation score" in notes
    assert "own sampling error no interval holds" in notes
    assert "not corrected for that choice" in notes
