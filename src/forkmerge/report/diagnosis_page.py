"""The page of a diagnosis: use, try, down-weight or drop each auxiliary, with the evidence."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forkmerge.algorithms.table_data import Table, show_seconds
from forkmerge.analysis.diagnosis.pieces import L2
from forkmerge.analysis.results import Diagnosis
from forkmerge.errors import command
from forkmerge.report.figure import MOST_LINES, Figure
from forkmerge.report.merge_figures import combination_gains, loss_lines
from forkmerge.report.page import Page, Section
from forkmerge.report.run_page import some
from forkmerge.report.transfer_figures import (
    cosine_against_gain,
    cosine_distribution,
    feature_map,
    gain_curve,
    shift_curve,
)
from forkmerge.report.verdict_table import verdict_table

_CONFLICT = "Gradient conflict"
_ADVICE = {"use": "use", "try": "try", "down-weight": "down-weight", "drop": "drop"}
_ADVICE |= {"no difference shown": "no difference is shown with"}


def diagnosis_page(diagnosis: Diagnosis, folder: Path) -> Page:
    """Return the page of a diagnosis."""
    findings, pictures = diagnosis.findings, diagnosis.pictures
    names, few = _strongest(diagnosis)
    similarities = [f.similarity for f in findings if f.similarity is not None and f.similarity.cosines]
    shifts = [f.shift for f in findings if f.shift is not None]
    steps = [gains for gains in diagnosis.one_step if gains.auxiliary in (*names, L2)]
    parts: dict[str, tuple[tuple[Callable[[Any], Figure], Sequence[Any]], ...]] = {
        _CONFLICT: ((cosine_distribution, similarities), (cosine_against_gain, steps)),
        "Distribution shift": ((shift_curve, shifts), (feature_map, pictures.features)),
        "Between the models": ((combination_gains, pictures.mixtures), (loss_lines, pictures.lines)),
    }
    sections = [
        Section("Verdicts", "", (_advice_first(verdict_table(diagnosis)), gain_curve([f.curve for f in findings])))
    ]
    for title, figures in parts.items():
        if drawn := tuple(draw(shown) for draw, shown in figures if shown):
            sections.append(Section(title, few if title == _CONFLICT and steps else "", drawn))
    made = {"this diagnosis": diagnosis.command} if diagnosis.command else {}
    return Page(
        title=f"Diagnosis of {diagnosis.target}",
        kind="diagnosis",
        headline=_headline(diagnosis),
        facts=_facts(diagnosis),
        sections=tuple(sections),
        configuration={"settings": diagnosis.settings, "plan": diagnosis.plan},
        environment=diagnosis.environment,
        commands={**made, "this page": command(f"report {shlex.quote(str(folder))}")},
    )


def _strongest(diagnosis: Diagnosis) -> tuple[list[str], str]:
    """Return the auxiliaries that get a panel each: of many those that help or hurt most at λ = 1, and a word on it."""
    sizes = {finding.auxiliary: abs(finding.curve.points[-1].mean) for finding in diagnosis.findings}
    ranks = {name: math.inf if math.isnan(size) else size for name, size in sizes.items()}
    chosen = sorted(ranks, key=ranks.__getitem__, reverse=True)[:MOST_LINES]
    if len(chosen) == len(ranks):
        return chosen, ""
    return chosen, (
        f"Of {len(ranks)} auxiliaries the {len(chosen)} with the largest mean gain or loss at λ = 1 have a panel of "
        "single steps."
    )


def _advice_first(table: Table) -> Table:
    """Put the advice, the table's last column, beside the names."""
    columns = (table.columns[0], table.columns[-1], *table.columns[1:-1])
    return replace(table, columns=columns, rows=tuple((row[0], row[-1], *row[1:-1]) for row in table.rows))


def _headline(diagnosis: Diagnosis) -> str:
    parts = []
    for advice, words in _ADVICE.items():
        names = [finding.auxiliary for finding in diagnosis.findings if finding.advice == advice]
        if names:
            parts.append(f"{words} {some(names)}")
    return f"For {diagnosis.target}: {'; '.join(parts)}." if parts else f"{diagnosis.target} has no auxiliary."


def _facts(diagnosis: Diagnosis) -> dict[str, str]:
    curve = next((finding.curve for finding in diagnosis.findings), None)
    facts = {"target": diagnosis.target, "auxiliaries": str(len(diagnosis.findings))}
    if curve is not None:
        facts |= {"seeds": str(len(curve.seeds)), "gains on": f"{curve.split} data", "with": curve.algorithm}
    return {**facts, "time of one process": show_seconds(diagnosis.seconds)}
