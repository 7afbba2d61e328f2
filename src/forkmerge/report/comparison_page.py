"""The page of a comparison: which method is better, by how much, how surely, and at what cost."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from forkmerge.analysis.merge_results import IntervalEffect, MethodCost, ParetoPoint, ParetoProjection
from forkmerge.comparison_tables import tables_of
from forkmerge.errors import ForkMergeError, StoreError, command
from forkmerge.history import Story, read_story
from forkmerge.outcomes import Outcome, read_outcomes, read_plan
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
from forkmerge.report.records import coefficient_history, learning_curve
from forkmerge.report.transfer_figures import numbers
from forkmerge.summary import Standing, Summary, summarise
from forkmerge.tables import Cell, Column, Table

_MOST_PAIRS = 6  # projections on two targets


def comparison_page(folder: Path) -> Page:
    """Return the page of a comparison, finished or not."""
    plan = read_plan(folder)
    if plan is None:
        raise StoreError(f"{folder} is not the folder of a comparison: it holds no plan.json.")
    outcomes = _ordered(read_outcomes(folder), plan)
    summary = summarise(outcomes, plan)
    stories = _stories(folder, outcomes)
    shown = _first_shown(summary)
    results: list[Table | Figure] = [verdict_table(summary), change_per_method(summary), *change_matrix(summary)]
    during = {"Learning": _learning(stories, shown), "Merges": [*_merges(stories), *_intervals(outcomes)]}
    sections = [Section("Which method is better", "", tuple(results))]
    sections.append(Section("Numbers", "", tuple(tables_of(summary))))
    if any(cost.time for cost in summary.costs.values()):
        sections.append(Section("Costs", "", (cost_per_method(costs_of(summary)), *_pareto(summary))))
    sections += [Section(title, "", tuple(items)) for title, items in during.items() if items]
    environments = [story.run.environment for _, story in stories if story.run is not None]
    return Page(
        title=f"Comparison {folder.name}",
        kind="comparison",
        headline=_headline(summary),
        facts=_facts(plan, summary, outcomes),
        sections=tuple(sections),
        notes=tuple(dict.fromkeys(f"{o.label} on {o.target}: {note}" for o in outcomes for note in o.notes))[:40],
        configuration=plan,
        environment=environments[0] if environments else None,
        commands={"this page": command(f"report {shlex.quote(str(folder))}")},
    )


def _ordered(outcomes: Sequence[Outcome], plan: Mapping[str, Any]) -> list[Outcome]:
    """Return the outcomes in the order of the plan, without those of methods or targets that are not in it."""
    methods = {method["word"]: place for place, method in enumerate(plan["methods"])}
    targets = {target: place for place, target in enumerate(plan["targets"])}
    known = [outcome for outcome in outcomes if outcome.method in methods and outcome.target in targets]
    return sorted(known, key=lambda outcome: (targets[outcome.target], methods[outcome.method], outcome.seed))


def _stories(folder: Path, outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Story]]:
    """Return the records of all runs that can be read, without those that only helped to choose a setting."""
    found = []
    for outcome in outcomes:
        if outcome.kind == "final" and outcome.error is None:
            try:
                found.append((outcome, read_story(folder / outcome.folder)))
            except (ForkMergeError, OSError, KeyError, TypeError):
                continue  # the tables do not need it
    return found


def judge(standing: Standing) -> str:
    """Return whether a method is better than the baseline, as far as the interval of the difference shows it."""
    paired = standing.to_baseline
    if paired is None or paired.low is None or paired.high is None:
        return "no evidence"
    return "better" if paired.low > 0 else "worse" if paired.high < 0 else "no evidence"


def verdict_table(summary: Summary) -> Table:
    """Return a verdict per method."""
    percent: dict[str, Any] = {"scale": 100.0, "decimals": 2, "signed": True}
    columns = (
        Column("method", is_words=True),
        Column(f"than {summary.baseline}", is_words=True),
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
            rows.append((Cell(text=standing.label), Cell(text=judge(standing)), Cell(paired.mean), between, *tally))
    rows.sort(key=lambda row: -(row[2].value or 0.0))
    note = (
        f"Better or worse: the {summary.confidence:.0%} interval of the mean paired difference to {summary.baseline} "
        "does not hold zero. No evidence: it does, or there is a single seed."
    )
    return Table("Verdicts", columns, tuple(rows), (note,))


def change_per_method(summary: Summary) -> Figure:
    """Δ_m of every method with its interval, best first."""
    known = [(s, s.to_baseline) for s in summary.overall if s.to_baseline is not None]
    ranked = sorted(known, key=lambda item: -item[1].mean)
    means = numbers(paired.mean for _, paired in ranked)
    sure = all(paired.low is not None for _, paired in ranked)
    dots = Series(
        "",
        means,
        tuple(float(place) for place in range(len(ranked))),
        numbers(paired.low for _, paired in ranked) if sure else (),
        numbers(paired.high for _, paired in ranked) if sure else (),
        kind="dots",
        values=means,
        texts=tuple(f"{s.label}: {p.wins} won, {p.ties} tied, {p.losses} lost" for s, p in ranked),
    )
    axis = Axis(f"Δ_m against {summary.baseline}", is_percent=True)
    caption = (
        f"Mean relative change against {summary.baseline} over targets and metrics, with the {summary.confidence:.0%} "
        "interval over seeds. Right of zero, red: better than training on the target alone. Left, blue: worse, "
        "which is negative transfer."
    )
    panel = Panel("", axis, Axis(labels=tuple(standing.label for standing, _ in ranked)), (dots,))
    return Figure("change", "Δ_m of every method", caption, (panel,))


def change_matrix(summary: Summary) -> list[Figure]:
    """Δ of every method on every target, where there are several targets."""
    targets = tuple(summary.targets)
    if len(targets) < 2:
        return []
    labels = tuple(s.label for s in summary.overall if s.to_baseline is not None)
    found = {t: {s.label: s.change.mean for s in summary.targets[t] if s.change is not None} for t in targets}
    rows = tuple(numbers(found[target].get(label) for target in targets) for label in labels)
    heat = Heat(rows, is_gain=True, is_written=len(targets) <= 12)
    caption = f"Relative change against {summary.baseline} by target. Blue and −: worse. Red and +: better."
    panel = Panel("", Axis("target", labels=targets), Axis(labels=labels, is_percent=True), heat=heat)
    return [Figure("targets", "Δ by target", caption, (panel,))]


def costs_of(summary: Summary) -> list[MethodCost]:
    """Return what every method costs and gives."""
    found = []
    for standing in summary.overall:
        cost = summary.costs[standing.method]
        change = None if standing.change is None else standing.change.mean
        found.append(MethodCost(standing.label, cost.time, change, cost.branches, cost.memory))
    return found


def _first_shown(summary: Summary) -> list[str]:
    """The baseline, equal weights and the methods of highest Δ_m."""
    ranked = sorted((s for s in summary.overall if s.change is not None), key=lambda s: -s.change.mean)  # type: ignore[union-attr]
    equal = [standing.label for standing in summary.overall if standing.method == "ew"]
    return list(dict.fromkeys([summary.baseline, *equal, *(s.label for s in ranked[:3])]))


def _learning(stories: Sequence[tuple[Outcome, Story]], shown: Sequence[str]) -> list[Figure]:
    curves = []
    for (target, label), runs in _grouped(stories).items():
        curve = learning_curve(label, target, runs)
        if len(curve.steps) > 1:
            curves.append(curve)
    return [learning_curves(curves, shown)] if curves else []


def _merges(stories: Sequence[tuple[Outcome, Story]]) -> list[Figure]:
    """Coefficients per target of every method that merges; with several, each panel says whose they are."""
    groups = {k: v for k, v in _grouped(stories).items() if all(any(len(r.branches) > 1 for r in run) for run in v)}
    methods = {label for _, label in groups}
    histories = {}
    for (target, label), runs in groups.items():
        title = target if len(methods) == 1 else f"{label} on {target}"
        histories[title] = coefficient_history(target, runs)
    return [coefficients_over_rounds(histories), relevance_over_rounds(histories)] if histories else []


def _grouped(stories: Sequence[tuple[Outcome, Story]]) -> dict[tuple[str, str], list[list[Any]]]:
    groups: dict[tuple[str, str], list[list[Any]]] = {}
    for outcome, story in stories:
        rounds = [r for r in story.rounds if r.phase == "search"]
        if rounds:
            groups.setdefault((outcome.target, outcome.label), []).append(rounds)
    return groups


def _intervals(outcomes: Sequence[Outcome]) -> list[Figure]:
    """The effect of Δt on validation, where it was tuned."""
    found: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for outcome in outcomes:
        interval, metric = outcome.setting.get("interval"), next(iter(outcome.validation), None)
        value = outcome.validation.get(metric) if metric else None
        if outcome.kind == "tuning" and isinstance(interval, int) and metric and value is not None:
            by_interval = found.setdefault((outcome.label, outcome.target, metric), {})
            by_interval.setdefault(interval, []).append(value)
    effects = []
    for (label, target, metric), values in found.items():
        intervals = tuple(sorted(values))
        if len(intervals) > 1:
            means = tuple(fmean(values[i]) for i in intervals)
            stds = tuple(stdev(values[i]) if len(values[i]) > 1 else 0.0 for i in intervals)
            runs = tuple(len(values[i]) for i in intervals)
            effects.append(IntervalEffect(f"{label} on {target}", metric, intervals, means, stds, runs))
    return [interval_effect(effects)] if effects else []


def _pareto(summary: Summary) -> list[Figure]:
    changes = {t: {s.label: s.change.mean for s in found if s.change} for t, found in summary.targets.items()}
    projections = []
    for first, second in list(combinations(changes, 2))[:_MOST_PAIRS]:
        both = [label for label in changes[first] if label in changes[second]]
        places = {label: (changes[first][label], changes[second][label]) for label in both}
        points = [
            ParetoPoint(label, x, y, not any(_beats(other, (x, y)) for other in places.values()), False)
            for label, (x, y) in places.items()
        ]
        projections.append(ParetoProjection(f"Δ on {first}", f"Δ on {second}", tuple(points)))
    return [pareto_projections(projections)] if projections else []


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] >= other[0] and one[1] >= other[1]


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
        return f"No method beats {summary.baseline} on average over {where}; {close}."
    sure = {"better": "a sure gain", "no evidence": "not yet sure"}.get(judge(best), "")
    text = f"{best.label} does best over {where}: {_percent(paired.mean)} against {summary.baseline}, {won}, {sure}."
    worse = [s.label for s in ranked if judge(s) == "worse"]
    if worse:
        text += f" Negative transfer is sure with {', '.join(worse[:4])}{' and others' * (len(worse) > 4)}."
    return text


def _percent(value: float) -> str:
    return f"{value:+.2%}".replace("-", "−")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _facts(plan: Mapping[str, Any], summary: Summary, outcomes: Sequence[Outcome]) -> dict[str, str]:
    final = [outcome for outcome in outcomes if outcome.kind == "final"]
    planned = len(plan["methods"]) * len(plan["targets"]) * len(plan["seeds"])
    return {
        "methods": str(len(plan["methods"])),
        "targets": ", ".join(plan["targets"]),
        "seeds": str(len(plan["seeds"])),
        "runs": f"{sum(o.is_complete for o in final)} of {planned}",
        "numbers of": {"test": "the test split", "validation": "validation data"}.get(summary.split, summary.split),
        "compared with": summary.baseline,
    }
