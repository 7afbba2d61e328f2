"""The page of a comparison: which method is better, by how much, how surely, and at what cost."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from forkmerge.algorithms.run_record import BranchRecord, Round, Run
from forkmerge.algorithms.saved_run import read_run
from forkmerge.algorithms.table_data import Cell, Column, Table
from forkmerge.algorithms.weight_grid import Point, read_points
from forkmerge.analysis.dynamics import (
    coefficient_history,
    common_criterion,
    learning_curve,
    method_costs,
    pareto_projection,
    place_of,
)
from forkmerge.analysis.merge_results import IntervalEffect
from forkmerge.errors import ForkMergeError, ProblemError, command
from forkmerge.experiments.paired_statistics import spread
from forkmerge.experiments.results_file import read_comparison
from forkmerge.experiments.run_results import RunResult
from forkmerge.experiments.summary import Standing, Summary, summarise
from forkmerge.report.comparison_tables import (
    costs_of_methods,
    gains_over_targets,
    reference_cells,
    reference_columns,
    reference_notes,
    target_tables,
)
from forkmerge.report.figure import Axis, Figure, Heat, Panel, Series
from forkmerge.report.merge_figures import (
    coefficients_over_rounds,
    cost_per_method,
    interval_effect,
    learning_curves,
    pareto_projections,
    relevance_over_rounds,
)
from forkmerge.report.page import Page, Section
from forkmerge.report.transfer_figures import numbers

_INTERVAL = re.compile(r"(.+)\[interval=(\d+)\]")
_MOST_PAIRS = 6  # projections on two targets


def comparison_page(source: Path) -> Page:
    """Return the page of a comparison, finished or not, from its folder or a file of records."""
    plan, results = read_comparison(source)
    results = _ordered(results, plan)
    summary = summarise(results, plan)
    runs = _runs(source, results)
    tables: list[Table | Figure] = [verdict_table(summary), change_per_method(summary), *change_matrix(summary)]
    during = {"Learning": _learning(runs, summary), "Merges": [*_merges(runs), *_intervals(results)]}
    sections = [Section("Which method is better", "", tuple(tables))]
    sections.append(Section("Numbers", "", (*target_tables(summary), gains_over_targets(summary))))
    costs: list[Table | Figure] = [costs_of_methods(summary)]
    if any(cost.time for cost in summary.costs.values()):
        costs += [cost_per_method(method_costs(summary)), *_pareto(source, results)]
    sections.append(Section("Costs", "", tuple(costs)))
    sections += [Section(title, "", tuple(items)) for title, items in during.items() if items]
    environments = [run.environment for group in runs.values() for run in group if run.environment]
    return Page(
        title=f"Comparison {source.stem}",
        kind="comparison",
        headline=_headline(summary),
        facts=_facts(plan, summary, results),
        sections=tuple(sections),
        notes=tuple(dict.fromkeys(f"{o.label} on {o.target}: {note}" for o in results for note in o.notes))[:40],
        configuration=plan,
        environment=environments[0] if environments else None,
        commands={"this page": command(f"report {shlex.quote(str(source))}")},
    )


def _ordered(results: Sequence[RunResult], plan: Mapping[str, Any]) -> list[RunResult]:
    """Return the results in the order of the plan, without those of methods or targets that are not in it."""
    methods = {method["word"]: position for position, method in enumerate(plan["methods"])}
    targets = {target: position for position, target in enumerate(plan["targets"])}
    members = [result for result in results if result.method in methods and result.target in targets]
    return sorted(members, key=lambda result: (targets[result.target], methods[result.method], result.seed))


def _runs(source: Path, results: Sequence[RunResult]) -> dict[tuple[str, str], list[Run]]:
    """Return the runs of every target and method, without those that only helped to choose a setting."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for result in results:
        if result.kind == "final" and result.error is None:
            groups.setdefault((result.target, result.label), []).append(_run_of(source, result))
    return groups


def _run_of(source: Path, result: RunResult) -> Run:
    """Return a run from its folder, or as much of it as its record holds."""
    try:
        if source.is_dir() and (source / result.folder).is_dir():
            return read_run(source / result.folder)
    except (ForkMergeError, OSError, KeyError, TypeError):
        pass  # the record has the most of it
    rounds = []
    for index, short in enumerate(result.rounds, 1):
        scores = short.get("branches", {"": short["score"]})
        record = Round(
            index=index,
            phase="search",
            start=0,
            end=short["end"],
            branches={name: BranchRecord({}, score, {}, {}, short["end"]) for name, score in scores.items()},
            candidates=[],
            coefficients=short.get("coefficients", {}),
            score=short["score"],
            relevance={},
            kept=[],
            metrics=short.get("metrics", {}),
        )
        rounds.append(record)
    metrics = {name: value for name, value in result.validation.items() if value is not None}
    return Run(result.label, result.target, result.steps, result.seed, None, metrics, "", rounds)


def judge(standing: Standing) -> str:
    """Return whether a method is better than its reference, as far as the interval of the difference shows it."""
    paired = standing.to_baseline
    if paired is None or paired.low is None or paired.high is None:
        return "no evidence"
    return "better" if paired.low > 0 else "worse" if paired.high < 0 else "no evidence"


def verdict_table(summary: Summary) -> Table:
    """Return a verdict per method."""
    percent: dict[str, Any] = {"scale": 100.0, "decimals": 2, "signed": True}
    columns = (
        Column("method", is_words=True),
        Column(f"than {summary.compared_with}", is_words=True, is_verdict=True),
        *reference_columns(summary),
        Column("Δ_m, per cent", **percent),
        Column(f"{summary.confidence:.0%} interval", **percent),
        Column("seeds won", decimals=0),
        Column("tied", decimals=0),
        Column("lost", decimals=0),
    )
    rows = []
    for standing in summary.overall:
        paired = standing.to_baseline
        if paired is not None:
            tally = (Cell(float(paired.wins)), Cell(float(paired.ties)), Cell(float(paired.losses)))
            between = Cell(low=paired.low, high=paired.high)
            words = (Cell(text=standing.label), Cell(text=judge(standing)), *reference_cells(summary, standing))
            rows.append((paired.mean, (*words, Cell(paired.mean), between, *tally)))
    rows.sort(key=lambda row: -row[0])
    note = (
        f"Better or worse: the {summary.confidence:.0%} interval of the mean paired difference to "
        f"{summary.compared_with} does not hold zero. No evidence: it does, or there is a single seed."
    )
    return Table("Verdicts", columns, tuple(row for _, row in rows), (note, *reference_notes(summary)))


def change_per_method(summary: Summary) -> Figure:
    """Δ_m of every method with its interval, best first."""
    pairs = [(s, s.to_baseline) for s in summary.overall if s.to_baseline is not None]
    ranked = sorted(pairs, key=lambda item: -item[1].mean)
    means = numbers(pair.mean for _, pair in ranked)
    has_intervals = any(pair.low is not None for _, pair in ranked)
    dots = Series(
        "",
        means,
        tuple(float(position) for position in range(len(ranked))),
        numbers(pair.low for _, pair in ranked) if has_intervals else (),
        numbers(pair.high for _, pair in ranked) if has_intervals else (),
        kind="dots",
        values=means,
        texts=tuple(f"{s.label}: {p.wins} won, {p.ties} tied, {p.losses} lost" for s, p in ranked),
    )
    axis = Axis(f"Δ_m against {summary.compared_with}", is_percent=True)
    caption = (
        f"Mean relative change against {summary.compared_with} over targets and metrics, with the "
        f"{summary.confidence:.0%} interval over seeds. Right of zero, green and ▲: better than training on the target "
        "alone. Left, red and ▼: worse, which is negative transfer."
    )
    panel = Panel("", axis, Axis(labels=tuple(standing.label for standing, _ in ranked)), (dots,))
    return Figure("change", "Δ_m of every method", caption, (panel,))


def change_matrix(summary: Summary) -> list[Figure]:
    """Δ of every method on every target, where there are several targets."""
    targets = tuple(summary.targets)
    if len(targets) < 2:
        return []
    labels = tuple(s.label for s in summary.overall if s.to_baseline is not None)
    changes = {t: {s.label: s.change.mean for s in summary.targets[t] if s.change is not None} for t in targets}
    rows = tuple(numbers(changes[target].get(label) for target in targets) for label in labels)
    heat = Heat(rows, is_gain=True, is_written=len(targets) <= 12)
    caption = f"Relative change against {summary.compared_with} by target. Red and −: worse. Green and +: better."
    panel = Panel("", Axis("target", labels=targets), Axis(labels=labels, is_percent=True), heat=heat)
    return [Figure("targets", "Δ by target", caption, (panel,))]


def _first_shown(summary: Summary) -> list[str]:
    """The baseline, equal weights and the methods of highest Δ_m."""
    ranked = sorted((s for s in summary.overall if s.change is not None), key=lambda s: -s.change.mean)  # type: ignore[union-attr]
    equal = [standing.label for standing in summary.overall if standing.method == "ew"]
    return list(dict.fromkeys([summary.baseline, *equal, *(s.label for s in ranked[:3])]))


def _learning(runs: Mapping[tuple[str, str], Sequence[Run]], summary: Summary) -> list[Figure]:
    """Learning curves, of several metrics against the baseline's; left out where it has no result to compare with."""
    curves = []
    for (target, label), group in runs.items():
        try:
            criterion = common_criterion(summary.directions.get(target, {}), runs.get((target, summary.baseline), ()))
            curve = learning_curve(label, group, criterion)
        except ProblemError:
            continue
        if len(curve.steps) > 1:
            curves.append(curve)
    return [learning_curves(curves, _first_shown(summary))] if curves else []


def _merges(runs: Mapping[tuple[str, str], Sequence[Run]]) -> list[Figure]:
    """Coefficients per target of every method that merges; with several, each panel says whose they are."""
    groups = {key: group for key, group in runs.items() if all(_merged(run) for run in group)}
    methods = {label for _, label in groups}
    histories = {}
    for (target, label), group in groups.items():
        same = [run for run in group if [r.end for r in run.searched] == [r.end for r in group[0].searched]]
        histories[target if len(methods) == 1 else f"{label} on {target}"] = coefficient_history(same)
    if not histories:
        return []
    weighed = {title: history for title, history in histories.items() if history.relevance}
    return [coefficients_over_rounds(histories), *([relevance_over_rounds(weighed)] if weighed else [])]


def _merged(run: Run) -> bool:
    return any(len(r.branches) > 1 for r in run.searched)


def _intervals(results: Sequence[RunResult]) -> list[Figure]:
    """The effect of Δt, where it was tuned (on validation), or where methods differ in it: forkmerge[interval=500]."""
    scores: dict[tuple[str, str], dict[int, list[float]]] = {}
    for result in results:
        swept = _INTERVAL.fullmatch(result.label) if result.kind == "final" else None
        tuned = result.setting.get("interval") if result.kind == "tuning" else None
        metrics = result.metrics if swept else result.validation
        metric = next(iter(metrics), "")
        value = metrics.get(metric)
        if value is not None and (swept or isinstance(tuned, int)):
            label, interval = (swept[1], int(swept[2])) if swept else (result.label, int(tuned or 0))
            key = f"{label} on {result.target}", metric
            scores.setdefault(key, {}).setdefault(interval, []).append(value)
    effects = []
    for (title, metric), values in scores.items():
        spreads = {interval: spread(values[interval]) for interval in sorted(values)}
        if len(spreads) > 1:
            means = tuple(each.mean for each in spreads.values())
            stds = tuple(each.std or 0.0 for each in spreads.values())
            counts = tuple(each.count for each in spreads.values())
            effects.append(IntervalEffect(title, metric, tuple(spreads), means, stds, counts))
    return [interval_effect(effects)] if effects else []


def _pareto(source: Path, results: Sequence[RunResult]) -> list[Figure]:
    """Two tasks at a time, by their first metrics; by those of validation where a grid search has points beside."""
    finals = [result for result in results if result.kind == "final" and result.is_complete]
    grid = next((points for each in finals if (points := _grid_of(source, each))), [])
    directions = {result.target: result.directions for result in finals}
    places: dict[str, dict[str, list[float]]] = {}
    for result in finals:
        metrics = {
            name: value for name, value in (result.validation if grid else result.metrics).items() if value is not None
        }
        if set(directions[result.target]) <= set(metrics):
            axis, value = place_of(result.target, metrics, directions[result.target])
            places.setdefault(axis, {}).setdefault(result.label, []).append(value)
    on_axes = [replace(p, scores=_on_axes(p.metrics, directions)) for p in grid if set(directions) <= set(p.metrics)]
    projections = []
    for x, y in list(combinations(places, 2))[:_MOST_PAIRS]:
        both = [label for label in places[x] if label in places[y]]
        scores = {label: {x: fmean(places[x][label]), y: fmean(places[y][label])} for label in both}
        projections.append(pareto_projection(x, y, on_axes, scores))
    return [pareto_projections(projections)] if projections else []


def _grid_of(source: Path, result: RunResult) -> list[Point]:
    """Return the points of a grid search; none where the run is another, or its folder is gone."""
    if "grid" not in result.method or not (source / result.folder).is_dir():
        return []
    try:
        return read_points(source / result.folder)
    except (ForkMergeError, OSError):
        return []


def _on_axes(
    metrics: Mapping[str, Mapping[str, float]], directions: Mapping[str, Mapping[str, int]]
) -> dict[str, float]:
    return dict(place_of(task, metrics[task], each) for task, each in directions.items())


def _headline(summary: Summary) -> str:
    ranked = sorted((s for s in summary.overall if s.to_baseline), key=lambda s: -s.to_baseline.mean)  # type: ignore[union-attr]
    if not ranked:
        return f"Nothing can be compared with {summary.baseline} yet."
    best = ranked[0]
    assert best.to_baseline is not None
    paired, where = best.to_baseline, _count(len(summary.targets), "target")
    won = f"{paired.wins} of {_count(paired.count, 'seed')} won"
    if paired.mean <= 0:
        close = f"{best.label} comes closest ({_percent(paired.mean)})"
        return f"No method beats {summary.compared_with} on average over {where}; {close}."
    sure = {"better": "a sure gain", "no evidence": "not yet sure"}.get(judge(best), "")
    text = f"{best.label} does best over {where}: {_percent(paired.mean)} against {best.reference}, {won}, {sure}."
    worse = [s.label for s in ranked if judge(s) == "worse"]
    if worse:
        text += f" Negative transfer is sure with {', '.join(worse[:4])}{' and others' * (len(worse) > 4)}."
    return text


def _percent(value: float) -> str:
    return f"{value:+.2%}".replace("-", "−")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _facts(plan: Mapping[str, Any], summary: Summary, results: Sequence[RunResult]) -> dict[str, str]:
    final = [result for result in results if result.kind == "final"]
    planned = len(plan["methods"]) * len(plan["targets"]) * len(plan["seeds"])
    return {
        "methods": str(len(plan["methods"])),
        "targets": ", ".join(plan["targets"]),
        "seeds": str(len(plan["seeds"])),
        "runs": f"{sum(o.is_complete for o in final)} of {planned}",
        "numbers of": {"test": "the test split", "validation": "validation data"}.get(summary.split, summary.split),
        "compared with": summary.compared_with,
    }
