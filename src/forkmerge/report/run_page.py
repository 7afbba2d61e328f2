"""The page of a run: what it reached, what its merges took, round by round."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from forkmerge.algorithms.run_record import Round, Run, rounds_table, shown_score
from forkmerge.algorithms.saved_run import SavedRun
from forkmerge.algorithms.table_data import Cell, Column, Table, show_metrics, show_seconds
from forkmerge.analysis.dynamics import coefficient_history
from forkmerge.errors import command
from forkmerge.experiments.verdict import Verdict
from forkmerge.report.figure import MOST_LINES, Axis, Figure, Panel, Series
from forkmerge.report.merge_figures import coefficients_over_rounds, relevance_over_rounds
from forkmerge.report.page import Page, Section
from forkmerge.report.transfer_figures import numbers

_USED, _HARDLY = 0.5, 0.1  # of what equal coefficients would give: where a task begins to be used, and to be refused


def run_page(saved: SavedRun) -> Page:
    """Return the page of a run, finished or not."""
    run, so_far = saved.run, _so_far(saved)
    rounds = so_far.searched
    merged = any(len(r.branches) > 1 for r in rounds)
    sections = []
    if so_far.verdict is not None:
        sections.append(Section("Did it help?", "", (verdict_table(Verdict.from_json(so_far.verdict)),)))
    if merged:
        history = {"": coefficient_history([so_far])}
        figures = coefficients_over_rounds(history), relevance_over_rounds(history)
        sections.append(Section("Auxiliary tasks", "", (auxiliaries_table(so_far), *figures)))
    if rounds:
        items: list[Table | Figure] = [
            scores_over_rounds(rounds, so_far.remarks),
            *losses_over_rounds(rounds),
            rounds_table(rounds, with_costs=True),
        ]
        sections.append(Section("Round by round", "", tuple(items)))
    return Page(
        title=f"{saved.algorithm} on {saved.target}",
        kind="run",
        headline=_headline(saved, so_far, merged),
        facts=_facts(saved),
        sections=tuple(sections),
        notes=(*(run.notes if run else ()), *saved.warnings),
        configuration=saved.config,
        environment=run.environment if run else saved.config.get("environment"),
        commands=_commands(saved),
    )


def verdict_table(verdict: Verdict) -> Table:
    """Return every metric of the run's model beside single-task training, with the interval of their difference."""
    rows = []
    for metric in verdict.metrics:
        change = Cell(metric.model - metric.single_task, low=metric.low, high=metric.high)
        rows.append(
            (
                Cell(text=f"{metric.name} {'↑' if metric.direction > 0 else '↓'}"),
                Cell(text=metric.decision),
                Cell(metric.single_task),
                Cell(metric.model),
                change,
            )
        )
    columns = (
        Column("metric", is_words=True),
        Column("verdict", is_words=True, is_verdict=True),
        Column("single-task training"),
        Column("this run"),
        Column("difference", signed=True, is_neutral=True),
    )
    level = f"The difference with its interval, {verdict.level} over {verdict.looked_at}, paired."
    said = (f"{line[:1].upper()}{line[1:].removesuffix('.')}." for line in verdict.lines[2:])
    return Table("This run beside single-task training", columns, tuple(rows), (level, *said))


def _so_far(saved: SavedRun) -> Run:
    """Return the run, or as much of it as its record holds."""
    return saved.run or Run(saved.algorithm, saved.target, saved.steps, 0, None, {}, "", saved.rounds)


def use_of(run: Run) -> dict[str, str]:
    """Return "used", "hardly used" or "refused" for every auxiliary, against what equal coefficients would give it."""
    words, branches = {}, [branch for r in run.searched for branch in r.branches.values()]
    for task, relevance in run.relevance.items():
        equal = fmean(branch.lr_scale * branch.task_weights.get(task, 0.0) for branch in branches)
        share = relevance / equal if equal else 0.0
        if task != run.target:
            words[task] = "used" if share >= _USED else "refused" if share < _HARDLY else "hardly used"
    return words


def auxiliaries_table(run: Run) -> Table:
    """Return what the merges made of every auxiliary."""
    rounds, relevance = run.searched, run.relevance
    last = next((r.relevance for r in reversed(rounds) if r.coefficients), {})
    rows = []
    for task, use in use_of(run).items():
        taken = sum(r.relevance.get(task, 0.0) > 0 for r in rounds)
        cells = Cell(relevance[task]), Cell(last.get(task, 0.0)), Cell(float(taken))
        rows.append((Cell(text=task), Cell(text=use), *cells))
    names = (
        Column("auxiliary", is_words=True),
        Column("verdict", is_words=True, is_verdict=True),
        Column("mean λ", decimals=3),
    )
    rest = Column("λ, last merge", decimals=3), Column(f"rounds with λ > 0, of {len(rounds)}", decimals=0)
    note = (
        f"λ: the task's weight that the merges amount to. Used: at least {_USED:.0%} of what equal coefficients would "
        f"give it; refused: less than {_HARDLY:.0%}. A merge takes what helps on validation data, which may be few "
        "examples."
    )
    return Table("What the merges made of each auxiliary", (*names, *rest), tuple(rows), (note,))


def scores_over_rounds(rounds: Sequence[Round], remarks: Sequence[str] = ()) -> Figure:
    """Validation score of every merge beside its branches, and what the record remarks on it."""
    steps = tuple(r.end for r in rounds)
    branches = list(dict.fromkeys(name for r in rounds for name in r.branches))
    title, sign = shown_score(rounds)

    def shown(scores: Iterable[float | None]) -> tuple[float | None, ...]:
        return numbers(None if score is None else sign * score for score in scores)

    merged = Series("merge", steps, shown(r.score for r in rounds))
    if len(branches) == 1:
        series = [replace(merged, name=branches[0])]
    elif len(branches) <= MOST_LINES:
        series = [Series(name, steps, shown(_score(r, name) for r in rounds)) for name in branches]
        series.append(merged)
    else:
        scores = [[b.score for b in r.branches.values() if b.score is not None] for r in rounds]
        best, worst = (shown(pick(row, default=None) for row in scores) for pick in (max, min))
        series = [merged, Series("best branch", steps, best)]
        series.append(Series("worst branch", steps, worst))
    about_floor, floor = "", shown(r.floor_score for r in rounds)
    if any(value is not None for value in floor):
        series.append(Series("floor", steps, floor))
        about_floor = " The floor is training on the target alone, which is never merged."
    caption = f"Validation {title} of the target at the end of each round."
    if len(branches) > 1:
        worse = "below" if sign > 0 else "above"
        caption += (
            f" Searched in this metric by argmax, the merge is never {worse} its best branch, where all candidates"
        )
        caption += " see the same examples; another metric or rule may prefer one that is."
    caption += about_floor
    for remark in remarks:
        caption += f" {remark[0].upper()}{remark[1:]}"
    return Figure("scores", f"Validation {title}", caption, (Panel("", Axis("step"), Axis(title), tuple(series)),))


def losses_over_rounds(rounds: Sequence[Round]) -> list[Figure]:
    """Mean training loss of every task by branch, where there are few enough to draw."""
    branches = list(dict.fromkeys(name for r in rounds for name in r.branches))
    tasks = list(dict.fromkeys(task for r in rounds for b in r.branches.values() for task in b.losses))
    if not tasks or len(tasks) > MOST_LINES or len(branches) > MOST_LINES:
        return []
    steps = tuple(r.end for r in rounds)
    panels = []
    for task in tasks:
        lines = [(name, numbers(_loss(r, name, task) for r in rounds)) for name in branches]
        series = tuple(Series(name, steps, y) for name, y in lines if any(value is not None for value in y))
        panels.append(Panel(task, Axis("step"), Axis("training loss"), series))
    caption = "Mean training loss over each round, one panel per task, one line per branch that trains on it."
    return [Figure("losses", "Training losses", caption, tuple(panels))]


def _score(r: Round, name: str) -> float | None:
    return r.branches[name].score if name in r.branches else None


def _loss(r: Round, name: str, task: str) -> float | None:
    return r.branches[name].losses.get(task) if name in r.branches else None


def _headline(saved: SavedRun, run: Run, merged: bool) -> str:
    if saved.run is None:
        last = next((r for r in reversed(run.searched) if r.score is not None), None)
        so_far = "" if last is None else f" Its last validation {' is '.join(last.reached.rsplit(' ', 1))}."
        reason = f" {saved.reason}" if saved.reason else ""
        position = f"at step {saved.step} of {saved.steps}"
        return f"{saved.algorithm} on {saved.target} is {saved.status} {position}.{so_far}{reason}"
    parts = []
    verdict = None if run.verdict is None else Verdict.from_json(run.verdict)
    if run.test:
        split = verdict.looked_at if verdict is not None and verdict.is_held_out else "the test split"
        parts.append(f"{show_metrics(run.test)} on {split}")
    if run.metrics:
        before = " before the refit" * (run.final == "refit")
        parts.append(f"{show_metrics(run.metrics)} on validation data{before}")
    text = f"{run.algorithm} on {run.target} reached {', and '.join(parts) or 'its last step'}."
    if verdict is not None:
        than = "No difference to single-task training is shown."
        text += f" {than}" if verdict.decision == "no difference shown" else f" It is {verdict.summary}."
    if merged:
        uses = use_of(run)
        for word in ("used", "hardly used", "refused"):
            tasks = [task for task, use in uses.items() if use == word]
            if tasks:
                text += f" It {word} {some(tasks)}."
    return text


def some(tasks: Sequence[str]) -> str:
    """Return names as part of a sentence, the first of them where there are many."""
    shown = list(tasks) if len(tasks) <= 5 else [*tasks[:4], f"{len(tasks) - 4} others"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _facts(saved: SavedRun) -> dict[str, str]:
    run = saved.run
    facts = {"target": saved.target, "algorithm": saved.algorithm, "status": saved.status, "steps": str(saved.steps)}
    if run is not None:
        facts |= {"seed": str(run.seed), "model": run.final}
        if run.seconds:
            facts["time"] = show_seconds(sum(run.seconds.values()))
    return {**facts, "last change": saved.changed.isoformat(" ", "minutes")}


def _commands(saved: SavedRun) -> dict[str, Any]:
    commands = {"this run": saved.source["command"]} if saved.source.get("command") else {}
    if saved.status == "interrupted":
        commands["continue it"] = saved.how_to_resume
    return {**commands, "this page": command(f"report {shlex.quote(str(saved.path))}")}
