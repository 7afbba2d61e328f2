"""The page of a diagnosis: use, down-weight or drop each auxiliary, with the evidence."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from forkmerge.analysis.pieces import L2
from forkmerge.analysis.results import AuxiliaryFinding, Diagnosis
from forkmerge.analysis.verdicts import verdict_table
from forkmerge.console import show_seconds
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
from forkmerge.tables import Table

_ADVICE = {"use": "use", "down-weight": "down-weight", "drop": "drop", "undecided": "gather more evidence on"}


def diagnosis_page(diagnosis: Diagnosis, folder: Path) -> Page:
    """Return the page of a diagnosis."""
    findings, pictures, names = diagnosis.findings, diagnosis.pictures, _strongest(diagnosis)
    first = partial(_names_first, names=names, others={f.auxiliary for f in findings} - set(names))
    similarities = [f.similarity for f in findings if f.similarity is not None and f.similarity.cosines]
    shifts = [f.shift for f in findings if f.shift is not None]
    conflicts = [
        *_drawn(lambda found: first(cosine_distribution(found)), [s for s in similarities if s.second in names]),
        *_drawn(cosine_against_gain, [found for found in diagnosis.one_step if found.auxiliary in (*names, L2)]),
    ]
    shifted = [*_drawn(lambda found: first(shift_curve(found)), shifts), *_drawn(feature_map, pictures.features)]
    between = [*_drawn(combination_gains, pictures.mixtures), *_drawn(loss_lines, pictures.lines)]
    gains = first(gain_curve([f.curve for f in findings]))
    sections = [Section("Verdicts", _of_many(names, findings), (_advice_first(verdict_table(diagnosis)), gains))]
    parts = {"Gradient conflict": conflicts, "Distribution shift": shifted, "Between the models": between}
    sections += [Section(title, "", tuple(figures)) for title, figures in parts.items() if figures]
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


def _drawn(draw: Callable[[Any], Figure], found: Sequence[Any]) -> list[Figure]:
    return [draw(found)] if found else []


def _strongest(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return the auxiliaries that figures show at once: all, or of many those that help or hurt most at λ = 1."""
    sizes = {finding.auxiliary: abs(finding.curve.points[-1].mean) for finding in diagnosis.findings}
    known = {name: math.inf if math.isnan(size) else size for name, size in sizes.items()}
    chosen = sorted(known, key=known.__getitem__, reverse=True)[:MOST_LINES]
    return tuple(name for name in known if name in chosen)


def _of_many(names: Sequence[str], findings: Sequence[AuxiliaryFinding]) -> str:
    if len(names) == len(findings):
        return ""
    return (
        f"Of {len(findings)} auxiliaries figures show the {len(names)} with the largest mean gain or loss at λ = 1; a "
        "click on a name draws another."
    )


def _names_first(figure: Figure, names: tuple[str, ...], others: Set[str]) -> Figure:
    """Hide the lines of other auxiliaries until somebody clicks on their name."""
    if not others:
        return figure
    panels = tuple(
        replace(panel, series=tuple(replace(series, is_shown=series.name not in others) for series in panel.series))
        for panel in figure.panels
    )
    return replace(figure, panels=panels, before=names)


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
