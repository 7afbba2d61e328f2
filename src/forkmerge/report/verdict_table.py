"""The verdict table of a diagnosis."""

from __future__ import annotations

import math
from dataclasses import replace

from forkmerge.algorithms.table_data import Cell, Column, Table
from forkmerge.analysis.results import AuxiliaryFinding, Diagnosis, Gain

_MEASURED = {"loss": "relative fall of the target's validation loss", "score": "relative rise of its validation score"}


def verdict_table(diagnosis: Diagnosis) -> Table:
    """Return one row per auxiliary: gains, verdict, gradients, shift, coefficient, advice."""
    columns = (
        Column("auxiliary", is_words=True),
        Column("TG at the best λ", signed=True, decimals=3),
        Column("λ", decimals=4),
        Column("TG at λ = 1", signed=True, decimals=3),
        Column("transfer", is_words=True, is_verdict=True),
        Column("cosine", signed=True, decimals=2, is_neutral=True),
        Column("CSD change", signed=True, decimals=3, is_neutral=True),
        Column("ForkMerge's λ", decimals=2),
        Column("short trial", signed=True, decimals=3, is_neutral=True),
        Column("advice", is_words=True, is_verdict=True),
    )
    rows = tuple(_row(finding) for finding in diagnosis.findings)
    notes = (*_explained(diagnosis), *_empty(diagnosis), *_reasons(diagnosis), *diagnosis.notes)
    return Table(f"What every auxiliary does to {diagnosis.target}", columns, rows, notes)


def _explained(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return what the columns mean."""
    split = {finding.curve.split for finding in diagnosis.findings}
    confidence = {finding.curve.confidence for finding in diagnosis.findings}
    measured = " or the ".join(_MEASURED[measure] for measure in sorted({f.measure for f in diagnosis.findings}))
    return (
        f"TG: transfer gain, the {' and '.join(sorted(split))} score with the auxiliary minus without it, over paired "
        f"seeds, with {100 * min(confidence, default=0.95):g}% intervals. λ: its weight, beside 1 for the target.",
        "Intervals are over seeds, and there is none where seeds show no spread. All runs share one validation set, "
        "whose own sampling error no interval holds.",
        "transfer holds for all λ together (Holm): an auxiliary that does nothing gets a verdict in at most "
        f"{100 * (1 - min(confidence, default=0.95)):.3g}% of cases.",
        "The best λ is chosen by its mean gain, and the interval beside it is not corrected for that choice.",
        "cosine: mean cosine of its gradients with the target's, halfway through the target's own training.",
        "CSD: confidence score discrepancy, 1 minus the mean confidence on inputs of the target; its change is how "
        "much less confident predictions are at λ = 1 than without the auxiliary.",
        "ForkMerge's λ: its mean weight in ForkMerge's merges, with one branch per auxiliary.",
        f"short trial: {measured} after a few steps with it.",
    )


def _empty(diagnosis: Diagnosis) -> list[str]:
    """Return why cells have no number; auxiliaries with the same reason share a line."""
    names: dict[str, list[str]] = {}
    for finding in diagnosis.findings:
        for why in _why_empty(finding):
            names.setdefault(why, []).append(finding.auxiliary)
    everyone = len(diagnosis.findings)
    return [f"No {why}{'' if len(tasks) == everyone else _of(tasks)}." for why, tasks in names.items()]


def _of(tasks: list[str]) -> str:
    return f" ({', '.join(tasks)})"


def _why_empty(finding: AuxiliaryFinding) -> list[str]:
    curve, reasons = finding.curve, []
    if any(point.low is None and math.isfinite(point.mean) for point in (curve.best, curve.points[-1])):
        seeds = "there is one seed" if len(curve.seeds) == 1 else "all seeds gained exactly the same"
        reasons.append(f"interval of TG: {seeds}")
    if finding.similarity is None:
        reasons.append("cosine: gradients were not compared, for a reason given below")
    elif not finding.similarity.cosines:
        reasons.append("cosine: in every batch one of the gradients was zero, not finite, or on no common parameter")
    if finding.shift is None:
        reasons.append("CSD change: the target's predictions are no scores of classes, which have a confidence")
    elif (change := finding.shift.change(curve.points[-1].weight)) is None or not math.isfinite(change):
        reasons.append("CSD change: a confidence was not finite, as after training that diverged")
    if finding.relevance is None:
        reasons.append("ForkMerge's λ: ForkMerge was not run")
    if finding.affinity is None:
        reasons.append("short trial: none was made")
    return reasons


def _reasons(diagnosis: Diagnosis) -> list[str]:
    """Return why each advice is given; auxiliaries with the same share a line."""
    names: dict[str, list[str]] = {}
    for finding in diagnosis.findings:
        names.setdefault(f"{finding.advice}, because {finding.reason}.", []).append(finding.auxiliary)
    return [f"{', '.join(tasks)}: {why}" for why, tasks in names.items()]


def _row(finding: AuxiliaryFinding) -> tuple[Cell, ...]:
    curve, last = finding.curve, finding.curve.points[-1]
    cosine = None if finding.similarity is None or not finding.similarity.cosines else finding.similarity.mean
    change = None if finding.shift is None else finding.shift.change(last.weight)
    return (
        Cell(text=finding.auxiliary),
        _gain(curve.best),
        Cell(curve.best.weight),
        _gain(last),
        Cell(text=curve.verdict),
        Cell(cosine),
        Cell(change if change is None or math.isfinite(change) else None),
        Cell(finding.relevance),
        _number(finding.affinity),
        Cell(text=finding.advice),
    )


def _gain(gain: Gain) -> Cell:
    return replace(_number(gain.mean), low=gain.low, high=gain.high)


def _number(value: float | None) -> Cell:
    """A number; what is not finite comes from training that diverged."""
    return Cell(text="diverged") if value is not None and not math.isfinite(value) else Cell(value)
