"""The tables of a comparison, made from its records alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forkmerge.algorithms.table_data import Cell, Column, Table
from forkmerge.engine.storage.atomic_files import write_atomically
from forkmerge.engine.storage.json_codec import encode, plain
from forkmerge.errors import ForkMergeError
from forkmerge.experiments.compared_methods import compared_method_from
from forkmerge.experiments.paired_statistics import Paired
from forkmerge.experiments.results_file import read_comparison
from forkmerge.experiments.summary import Cost, Standing, Summary, summarise
from forkmerge.methods import METHODS, facts_of
from forkmerge.report.table import to_csv, to_latex, to_markdown

FILES = ("comparison.md", "comparison.csv", "comparison.tex", "comparison.json")
_SPLITS = {
    "test": "Numbers are of the test split, which was read once per run, after its fit; every choice was made on "
    "validation data.",
    "held out": "The problem has no test split: numbers are of validation examples that were kept from all choices, "
    "and read once per run, after its fit.",
    "validation": "The problem has no test split: numbers are of the validation data, on which choices were made, too, "
    "and are the better for it.",
    "mixed": "Numbers are of the test split where a target has one, read once per run, after its fit, and otherwise of "
    "the validation data, on which choices were made, too.",
}


def summary_from(out: str | os.PathLike[str]) -> Summary:
    """Return the numbers of a comparison from its folder, or from a file of records."""
    plan, results = read_comparison(out)
    return summarise(results, plan)


def tables_from(out: str | os.PathLike[str]) -> list[Table]:
    """Return the tables of a comparison, from its folder or a file of records: one per target, then Δ_m and costs."""
    return tables_of(summary_from(out))


def write_tables(out: str | os.PathLike[str]) -> dict[str, Any]:
    """Write the tables into a comparison's folder and return what comparison.json holds; a file is only read."""
    plan, results = read_comparison(out)
    summary, folder = summarise(results, plan), Path(out)
    tables = tables_of(summary)
    data: dict[str, Any] = {**vars(summary), "plan": plan, "files": []}
    if folder.is_file():
        return data
    data["files"] = [str(folder / name) for name in FILES]
    forms = (to_markdown(tables), to_csv(tables), to_latex(tables))
    for name, text in zip(FILES, (*forms, encode(plain(data), 2).decode()), strict=True):
        write_atomically(folder / name, text.encode())
    return data


def tables_of(summary: Summary) -> list[Table]:
    """Return the tables of a comparison."""
    return [*target_tables(summary), _overall_table(summary)]


def target_tables(summary: Summary) -> list[Table]:
    """Return a table for every target."""
    return [_target_table(summary, target) for target in summary.targets]


def _target_table(summary: Summary, target: str) -> Table:
    standings, directions = summary.targets[target], summary.directions[target]
    metrics = [Column(name, direction) for name, direction in directions.items()]
    rows = []
    for standing in standings:
        values = [standing.metrics.get(name) for name in directions]
        cells = [Cell() if value is None else Cell(value.mean, value.std) for value in values]
        rows.append([Cell(text=standing.label), *cells, *reference_cells(summary, standing), *_paired_cells(standing)])
    names = [Column("method", is_words=True), *metrics, *reference_columns(summary), *_paired_columns(summary, "Δ")]
    best = {i + 1: direction for i, direction in enumerate(directions.values())}
    notes = [
        _SPLITS[summary.split],
        f"Δ: mean over metrics of the signed relative change against the mean of {summary.compared_with}, in per "
        "cent. " + _reading(summary),
        *reference_notes(summary),
        *_rivals(standings),
    ]
    chosen = summary.settings.get(target, {})
    if chosen:
        shown = "; ".join(f"{label} {_setting(setting)}" for label, setting in chosen.items())
        notes.append(f"chosen on validation: {shown}.")
    return Table(
        f"target: {target}",
        tuple(names),
        _bold(rows, {**best, len(names) - len(_paired_columns(summary, "")): 1}),
        tuple(notes),
    )


def _overall_table(summary: Summary) -> Table:
    gains, costs = gains_over_targets(summary), costs_of_methods(summary)
    rows = tuple((*ours, *theirs[1:]) for ours, theirs in zip(gains.rows, costs.rows, strict=True))
    columns, notes = (*gains.columns, *costs.columns[1:]), (*gains.notes, *costs.notes)
    return Table("Δ_m over all targets, and costs", columns, rows, notes)


def gains_over_targets(summary: Summary) -> Table:
    """Return Δ of every target, and Δ_m of all."""
    targets = list(summary.targets) if len(summary.targets) > 1 else []
    rows = []
    for standing in summary.overall:
        by_target = [_change(summary.targets[target], standing.method) for target in targets]
        gains = [*by_target, *reference_cells(summary, standing), *_paired_cells(standing)]
        rows.append([Cell(text=standing.label), *gains])
    percent = {"scale": 100.0, "decimals": 2, "signed": True}
    columns = [Column("method", is_words=True), *(Column(f"Δ {target}", **percent) for target in targets)]  # type: ignore[arg-type]
    columns += [*reference_columns(summary), *_paired_columns(summary, "Δ_m")]
    notes = [
        f"Δ_m: mean over {len(summary.targets)} target{'s' * (len(summary.targets) != 1)} of Δ, in per cent.",
        _SPLITS[summary.split],
        _reading(summary),
        *reference_notes(summary),
        *_rivals(summary.overall),
    ]
    if summary.equal_labels:
        notes.append("Equal labels: in the end every method was trained on training ∪ validation data of the target.")
    notes += [f"failed: {failure}" for failure in summary.failures]
    best = dict.fromkeys([*range(1, len(targets) + 1), len(targets) + 1 + len(reference_columns(summary))], 1)
    return Table("Δ_m over all targets", tuple(columns), _bold(rows, best), tuple(notes))


def costs_of_methods(summary: Summary) -> Table:
    """Return what every method takes."""
    rows = [(Cell(text=s.label), *_cost_cells(summary.costs[s.method])) for s in summary.overall]
    columns = [Column("method", is_words=True), Column("B")]
    columns += [Column("Δ_m/(B−1)", scale=100.0, decimals=2, signed=True)]
    columns += [Column("time ×", decimals=2), Column("memory", decimals=1, signed=True, is_neutral=True)]
    notes = [
        f"B: branches, or the runs that take their place. time: one run and its tuning, all branches added up, as a "
        f"ratio to one run of {summary.baseline}. memory: model sizes held beyond those of {summary.baseline}, in "
        "weights, optimizer states and gradients, activations apart.",
        *_memory_notes(summary),
    ]
    return Table("Costs", tuple(columns), tuple(rows), tuple(notes))


def reference_columns(summary: Summary) -> list[Column]:
    """The column that says what a row's gains are against, where rows differ in it."""
    return [Column("compared with", is_words=True)] if summary.has_references else []


def reference_cells(summary: Summary, standing: Standing) -> list[Cell]:
    """Its cell in a row; empty for the single-task trainings themselves."""
    return [Cell(text=standing.reference or "")] if summary.has_references else []


def reference_notes(summary: Summary) -> list[str]:
    """Why rows differ in it; or that all models are chosen alike, that of the baseline, too."""
    if not summary.has_references:
        chosen = (
            f"Validation chose every model among those of its training, that of {summary.baseline}, too, as often: "
        )
        return [f"{chosen}stopping early is not transfer."] if summary.is_selected else []
    return [
        "compared with: single-task training with the same selection. A method whose model is chosen on validation, "
        'among those of its training (select="best", or checkpoints that are), is compared with single-task training '
        "whose model is chosen alike, as often: stopping early is not transfer."
    ]


def _paired_columns(summary: Summary, name: str) -> list[Column]:
    percent = {"scale": 100.0, "decimals": 2, "signed": True}
    level = f"{summary.confidence:.0%}"
    return [
        Column(name, **percent),  # type: ignore[arg-type]
        Column(f"{level} interval", **percent),  # type: ignore[arg-type]
        Column("w–t–l"),
        Column("to best other", **percent),  # type: ignore[arg-type]
        Column("w–t–l to best other"),
    ]


def _paired_cells(standing: Standing) -> list[Cell]:
    change, base, rival = standing.change, standing.to_baseline, standing.to_rival
    return [
        Cell() if change is None else Cell(change.mean, change.std),
        Cell() if base is None else Cell(low=base.low, high=base.high),
        _tally(base),
        Cell() if rival is None else Cell(rival.mean, low=rival.low, high=rival.high),
        _tally(rival),
    ]


def _tally(paired: Paired | None) -> Cell:
    return Cell() if paired is None else Cell(text=f"{paired.wins}–{paired.ties}–{paired.losses}")


def _change(standings: Sequence[Standing], method: str) -> Cell:
    change = next((standing.change for standing in standings if standing.method == method), None)
    return Cell() if change is None else Cell(change.mean)


def _cost_cells(cost: Cost) -> list[Cell]:
    return [Cell(text=str(cost.branches)), Cell(cost.per_branch), Cell(cost.time), Cell(cost.memory)]


def _bold(rows: Sequence[Sequence[Cell]], columns: dict[int, int]) -> tuple[tuple[Cell, ...], ...]:
    """Mark the best numbers of some columns, given the direction of each."""
    best = {}
    for index, direction in columns.items():
        values = [direction * row[index].value for row in rows if row[index].value is not None]  # type: ignore[operator]
        best[index] = max(values, default=None)

    def marked(index: int, cell: Cell) -> Cell:
        if index not in columns or cell.value is None or columns[index] * cell.value != best[index]:
            return cell
        return Cell(cell.value, cell.std, cell.low, cell.high, cell.text, is_best=True)

    return tuple(tuple(marked(index, cell) for index, cell in enumerate(row)) for row in rows)


def _reading(summary: Summary) -> str:
    count = len(summary.seeds)
    if count == 1:
        return "One seed: there is no spread and no interval."
    return (
        f"Mean ± standard deviation over {count} seeds. The interval is that of the mean paired difference to "
        f"{summary.compared_with} over seeds (paired t, {summary.confidence:.0%}). w–t–l: seeds won, tied and lost."
    )


def _rivals(standings: Sequence[Standing]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for standing in standings:
        if standing.rival is not None:
            groups.setdefault(standing.rival, []).append(standing.label)
    if not groups:
        return []
    leader, *others = sorted(groups, key=lambda rival: -len(groups[rival]))  # of equals the first
    if any(standing.reference not in (None, standings[0].label) for standing in standings):
        whose = "; ".join(f"{rival} for {', '.join(labels)}" for rival, labels in groups.items())
        text = f"The best other method with the same reference, by its mean here, is {whose}."
    else:
        exception = f"; for {groups[others[0]][0]} itself it is {others[0]}" if others else ""
        text = f"The best other method, by its mean here, is {leader}{exception}."
    return [f"{text} It was picked by the numbers it is compared with, which favours it."]


def _memory_notes(summary: Summary) -> list[str]:
    """Say in words what methods hold that the column of numbers does not show."""
    notes = []
    for standing in summary.overall:
        try:
            name = compared_method_from(standing.method).method
        except ForkMergeError:
            continue
        words = facts_of(METHODS[name])["memory"] if name in METHODS else ""
        if words not in ("", "none", "K shared gradients"):
            notes.append(f"{standing.label} holds, by its own account: {words}.")
    return notes


def _setting(setting: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in setting.items())
