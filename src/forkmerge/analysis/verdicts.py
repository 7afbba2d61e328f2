"""The verdict table of a diagnosis."""

from __future__ import annotations

from forkmerge.analysis.results import AuxiliaryFinding, Diagnosis, Gain
from forkmerge.tables import Cell, Column, Table


def verdict_table(diagnosis: Diagnosis) -> Table:
    """Return one row per auxiliary: gains, verdict, gradients, shift, coefficient, advice."""
    columns = (
        Column("auxiliary", is_words=True),
        Column("TG at the best λ", signed=True, decimals=3),
        Column("λ", decimals=4),
        Column("TG at λ = 1", signed=True, decimals=3),
        Column("transfer", is_words=True),
        Column("cosine", signed=True, decimals=2),
        Column("CSD change", signed=True, decimals=3),
        Column("ForkMerge's λ", decimals=2),
        Column("short trial", signed=True, decimals=3),
        Column("advice", is_words=True),
    )
    split = {finding.curve.split for finding in diagnosis.findings}
    confidence = {finding.curve.confidence for finding in diagnosis.findings}
    notes = (
        f"TG: {' and '.join(sorted(split))} score with the auxiliary minus without it, over paired seeds, with "
        f"{100 * min(confidence, default=0.95):g}% intervals.",
        "cosine: mean cosine of its gradients with the target's, halfway through the target's own training.",
        "CSD change: how much less confident the target's predictions are at λ = 1 than without it.",
        "ForkMerge's λ: its mean weight in ForkMerge's merges, with one branch per auxiliary.",
        "short trial: relative fall of the target's validation loss after a few steps with it.",
        *(f"{finding.auxiliary}: {finding.advice}, because {finding.reason}." for finding in diagnosis.findings),
        *diagnosis.notes,
    )
    rows = tuple(_row(finding) for finding in diagnosis.findings)
    return Table(f"What every auxiliary does to {diagnosis.target}", columns, rows, notes)


def _row(finding: AuxiliaryFinding) -> tuple[Cell, ...]:
    curve, last = finding.curve, finding.curve.points[-1]
    cosine = None if finding.similarity is None or not finding.similarity.cosines else finding.similarity.mean
    change = None if finding.shift is None else finding.shift.points[-1].mean - finding.shift.points[0].mean
    return (
        Cell(text=finding.auxiliary),
        _gain(curve.best),
        Cell(curve.best.weight),
        _gain(last),
        Cell(text=curve.verdict),
        Cell(cosine),
        Cell(change),
        Cell(finding.relevance),
        Cell(finding.affinity),
        Cell(text=finding.advice),
    )


def _gain(gain: Gain) -> Cell:
    return Cell(gain.mean, low=gain.low, high=gain.high)
