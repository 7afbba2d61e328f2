"""The verdict table of a diagnosis."""

from __future__ import annotations

import math

from forkmerge.analysis.results import AuxiliaryFinding, Diagnosis, GradientSimilarity, ShiftCurve, ShiftPoint
from forkmerge.analysis.transfer import transfer_curve
from forkmerge.report.verdict_table import verdict_table

GOOD, BAD = (0.09, 0.1, 0.11), (-0.09, -0.1, -0.11)


def curve(*gains, weight=1.0):
    seeds = range(len(gains))
    return transfer_curve(
        {weight: dict(zip(seeds, gains, strict=True))}, dict.fromkeys(seeds, 0.0), target="t", auxiliary="a"
    )


def cells_of(table, row=0):
    return dict(zip([column.name for column in table.columns], table.rows[row], strict=True))


def test_every_empty_cell_says_why_it_is_empty():
    nothing = GradientSimilarity("t", "a", 3, (), 4, math.nan, None)
    shifted = ShiftCurve("t", "a", "validation", (0,), (ShiftPoint(0.0, (0.1,), 0.1, None, 0.0),))
    full = AuxiliaryFinding("a", curve(*GOOD), nothing, shifted, 0.3, 0.2, "use", "why")
    bare = AuxiliaryFinding("b", curve(0.1), None, None, None, None, "no difference shown", "why")
    table = verdict_table(Diagnosis("t", (full, bare), {}))
    notes = "\n".join(table.notes)
    for note in (
        "No cosine: in every batch one of the gradients was zero, not finite, or on no common parameter (a).",
        "No CSD change: a confidence was not finite, as after training that diverged (a).",
        "No interval of TG: there is one seed (b).",
        "No cosine: gradients were not compared, for a reason given below (b).",
        "No CSD change: the target's predictions are no scores of classes, which have a confidence (b).",
        "No ForkMerge's λ: ForkMerge was not run (b).",
        "No short trial: none was made (b).",
    ):
        assert note in notes
    assert len([note for note in table.notes if note.startswith("No ")]) == 7
    assert cells_of(table)["ForkMerge's λ"].value == 0.3


def test_a_table_without_empty_cells_explains_none():
    similar = GradientSimilarity("t", "a", 3, (0.1, 0.2), 0, 0.15, 0.05)
    points = tuple(ShiftPoint(weight, (0.1,), 0.1, None, 0.0) for weight in (0.0, 1.0))
    shifted = ShiftCurve("t", "a", "validation", (0, 1, 2), points)
    finding = AuxiliaryFinding("a", curve(*GOOD), similar, shifted, 0.3, 0.2, "use", "why")
    assert not any(note.startswith("No ") for note in verdict_table(Diagnosis("t", (finding,), {})).notes)


def test_only_gains_have_a_colour():
    findings = [AuxiliaryFinding("a", curve(*GOOD), None, None, None, 0.2, "use", "why", "score")]
    table = verdict_table(Diagnosis("t", tuple(findings), {}))
    assert [c.name for c in table.columns if c.signed and not c.is_neutral] == ["TG at the best λ", "TG at λ = 1"]
    notes = "\n".join(table.notes)
    assert "relative rise of its validation score" in notes
    assert "own sampling error no interval holds" in notes
    assert "not corrected for that choice" in notes
