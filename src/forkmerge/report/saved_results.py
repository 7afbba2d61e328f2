"""Results of an analysis, kept in the folder of what they are about, so that its page shows them.

DIR/analysis/NAME.json   one result: `{"kind": "LossLine", "result": {…}}`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forkmerge.algorithms.table_data import Cell, Column, Table, show_shares
from forkmerge.analysis import merge_results as merges
from forkmerge.analysis import results as transfer
from forkmerge.engine.storage.atomic_files import check_entries, explained
from forkmerge.engine.storage.json_codec import plain
from forkmerge.engine.storage.json_files import interpreting, read_object, write_object
from forkmerge.engine.storage.records import Record
from forkmerge.errors import ConfigError, check_name, unknown_name
from forkmerge.report import merge_figures, transfer_figures
from forkmerge.report.figure import Figure

PLACE = "analysis"
Show = Callable[[Mapping[str, Any]], Figure | Table]
"""From results of one kind, by the names they were kept under, to what shows them."""


def save_result(folder: str | os.PathLike[str], name: str, result: Record) -> Path:
    """Keep a result with a run, a comparison or a diagnosis; its page will show it.

    Args:
        folder: Their folder.
        name: A name for the file; an earlier result of that name is replaced.
        result: Any result that a figure or table is made of.
    """
    kind = type(result).__name__
    if kind not in _SHOWN:
        raise ConfigError(unknown_name("result", kind, _SHOWN))
    analyses = Path(folder) / PLACE
    with explained(f"make the folder {analyses}"):
        check_entries(Path(folder))
        analyses.mkdir(parents=True, exist_ok=True)
    path = analyses / f"{check_name('result', name)}.json"
    write_object(path, {"kind": kind, "result": plain(result)})
    return path


def saved_items(folder: Path) -> list[Figure | Table]:
    """Return a figure or a table for every kind of result kept in a folder."""
    results: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / PLACE).glob("*.json")):
        data = read_object(path)
        with interpreting(path, "a result of an analysis"):
            kind, content = data["kind"], data["result"]
            result = _SHOWN[kind][0].from_json(content, name=path)
        results.setdefault(kind, {})[path.stem] = result
    return [_SHOWN[kind][1](results[kind]) for kind in _SHOWN if kind in results]


def _coefficients(histories: Mapping[str, merges.CoefficientHistory]) -> Figure:
    """One panel per history; where a target has several, each also says the name it was kept under."""
    targets = [history.target for history in histories.values()]
    titles = {
        name: history.target if targets.count(history.target) == 1 else f"{history.target}, {name}"
        for name, history in histories.items()
    }
    return merge_figures.coefficients_over_rounds({titles[name]: histories[name] for name in histories})


def _listed(show: Callable[[Sequence[Any]], Figure | Table]) -> Show:
    return lambda results: show(list(results.values()))


def replays(results: Sequence[merges.Replay]) -> Table:
    """What other searches, metrics or data would have chosen."""
    columns = [Column("round", is_words=True), Column("what was changed", is_words=True)]
    columns += [Column("chosen", is_words=True), Column("recorded", is_words=True)]
    columns += [Column("score"), Column("score of the recorded"), Column("candidates", decimals=0)]
    rows = tuple(
        (
            Cell(text=str(r.round)),
            Cell(text=r.question),
            Cell(text=_shares(r.chosen)),
            Cell(text=_shares(r.recorded)),
            Cell(r.score),
            Cell(r.recorded_score),
            Cell(float(r.evaluations)),
        )
        for r in results
    )
    return Table("Merges searched again", tuple(columns), rows)


def counterfactuals(results: Sequence[merges.Counterfactual]) -> Table:
    """What each merge would have been without a branch."""
    columns = [Column("round", is_words=True), Column("without", is_words=True), Column("score as it was")]
    columns += [Column("others scaled up"), Column("others searched"), Column("their coefficients", is_words=True)]
    rows = tuple(
        (
            Cell(text=str(c.round)),
            Cell(text=c.branch),
            Cell(c.score),
            Cell(c.without if c.without == c.without else None),
            Cell(c.searched if c.searched == c.searched else None),
            Cell(text=_shares(c.coefficients)),
        )
        for c in results
    )
    return Table("What if a branch had been left out", tuple(columns), rows)


def survivals(results: Sequence[merges.Survival]) -> Table:
    """How much of each merge's gain is left on examples that the search has not seen."""
    columns = [Column("round", is_words=True), Column("gain where searched", signed=True)]
    columns += [Column("gain on the other half", signed=True), Column("kept, %", scale=100.0, decimals=0)]
    rows = tuple((Cell(text=str(s.round)), Cell(s.mean_seen), Cell(s.mean_unseen), Cell(s.kept)) for s in results)
    notes = dict.fromkeys(  # each half is searched on once
        f"Validation data halved {len(s.seen) // 2} times; gains are over the branch {s.baseline}." for s in results
    )
    return Table("How much of the gain survives", tuple(columns), rows, tuple(notes))


def _shares(coefficients: Mapping[str, float]) -> str:
    return show_shares({name: value for name, value in coefficients.items() if value}) or "none"


_KINDS: tuple[tuple[type[Record], Show], ...] = (
    (transfer.TransferCurve, _listed(transfer_figures.gain_curve)),
    (transfer.TransferMatrix, _listed(transfer_figures.gain_matrix)),
    (transfer.GradientSimilarity, _listed(transfer_figures.cosine_distribution)),
    (transfer.OneStepGains, _listed(transfer_figures.cosine_against_gain)),
    (transfer.ShiftCurve, _listed(transfer_figures.shift_curve)),
    (transfer.FeatureMap, _listed(transfer_figures.feature_map)),
    (merges.CombinationGains, _listed(merge_figures.combination_gains)),
    (merges.LossLine, _listed(merge_figures.loss_lines)),
    (merges.LossPlane, _listed(merge_figures.loss_plane)),
    (merges.CoefficientHistory, _coefficients),
    (merges.LearningCurve, _listed(merge_figures.learning_curves)),
    (merges.IntervalEffect, _listed(merge_figures.interval_effect)),
    (merges.MethodCost, _listed(merge_figures.cost_per_method)),
    (merges.ParetoProjection, _listed(merge_figures.pareto_projections)),
    (merges.Replay, _listed(replays)),
    (merges.Counterfactual, _listed(counterfactuals)),
    (merges.Survival, _listed(survivals)),
)
_SHOWN = {kind.__name__: (kind, show) for kind, show in _KINDS}
"""How every kind of result is shown, in the order of a page."""
